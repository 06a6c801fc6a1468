"Jobs for the launcher, by name"
def returns_a_generator(ctx, obj): return (i for i in range(3))
