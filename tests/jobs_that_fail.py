"Jobs for the launcher, by name"
def returns_a_generator(ctx, rank): return (i for i in range(3)) if ctx.rank == rank else None
