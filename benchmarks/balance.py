"""How long do ranks wait for each other on texts of mixed lengths?

A step lasts as long as its slowest rank, and a rank's batch is padded to its longest text. So the wall cost of an
epoch is the sum over its steps of the busiest rank's padded tokens; what it would be if no rank waited is the mean
over ranks. Their ratio is printed for our sharding (the real `shard_dl` on a real `SortedDL`, all ranks in this
process) and for contiguous slices of the epoch's order, one for each rank, as fastai's distributed loader takes them.

The lengths are log-normal with the mean of IMDB's reviews (233 words). How long the tail is decides the ratio: the
longest of many texts is an outlier in its own batch, and some rank has to take it. `--sigma` sets it; the table shows
others, too.

    python benchmarks/balance.py [--machine cpu-2core] [--texts 4000] [--bs 64] [--sigma 0.6] [--epochs 5]
"""
import random, warnings
import numpy as np, torch

warnings.filterwarnings('ignore', category=FutureWarning)    # torch's own, while fastai is imported
from fastai.text.data import SortedDL
from fastddp.fastai2.loaders import shard_dl
from fastddp.base.rng import CommonRNG
from common import argument_parser, save

BUDGET = {2: 1.02, 4: 1.05, 8: 1.10}
SIGMAS = .5, .6, .7


def lengths(n, sigma, mean=233, seed=0):
    "`n` log-normal lengths of this mean, from 10 to 2500 words as in IMDB"
    mu = np.log(mean) - sigma**2/2
    return np.random.default_rng(seed).lognormal(mu, sigma, n).clip(10, 2500).astype(int).tolist()


def seeded(seed, f):
    random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)
    return f()


def loader(lens, bs):
    return SortedDL(range(len(lens)), bs=bs, sort_func=lens.__getitem__, res=lens, shuffle=True, num_workers=0)


def ours(lens, bs, n, batch, seed):
    "Each rank's batches in one epoch"
    def rank(r):
        dl = seeded(seed, lambda: shard_dl(loader(lens, bs), r, n, batch, common=CommonRNG.capture()))
        return [b.tolist() for b in dl]
    return [rank(r) for r in range(n)]


def slices(lens, bs, n, batch, seed):
    "Each rank's batches if each gets one contiguous part of the epoch's order, the last one padded from its start"
    order = seeded(seed, lambda: [*loader(lens, bs).get_idxs()])
    part, b = -(-len(order)//n), bs if batch == 'per_worker' else max(1, bs//n)
    order += order[:part*n-len(order)]
    return [[order[i:min(i+b, (r+1)*part)] for i in range(r*part, (r+1)*part, b)] for r in range(n)]


def ratio(parts, lens):
    "Wall cost over the mean cost of a rank, in padded tokens"
    cost = [[len(b)*max(lens[i] for i in b) for b in p] for p in parts]
    assert len({len(p) for p in parts}) == 1, 'all ranks take the same steps'
    return sum(map(max, zip(*cost))) / (sum(map(sum, cost))/len(parts))


def measure(how, lens, n, args, batch):
    return float(np.mean([ratio(how(lens, args.bs, n, batch, seed), lens) for seed in range(args.epochs)]))


def main():
    p = argument_parser(__doc__, repeats=1)     # nothing is timed
    p.add_argument('--texts', type=int, default=4000)
    p.add_argument('--bs', type=int, default=64)
    p.add_argument('--sigma', type=float, default=.6)
    p.add_argument('--epochs', type=int, default=5)
    args, rows = p.parse_args(), []
    if args.small: args.texts, args.epochs = 512, 1
    print(f'{args.texts} texts, SortedDL, batch {args.bs}, mean of {args.epochs} epochs: busiest rank over the mean\n')
    print(f"{'sigma':>5} {'batch':>10} {'ranks':>5} {'shard (ours)':>12} {'slices':>7} {'budget':>7}")
    for sigma in sorted({*SIGMAS, args.sigma}):
        lens = lengths(args.texts, sigma)
        for batch in 'per_worker', 'global':
            for n in BUDGET:
                o, c = measure(ours, lens, n, args, batch), measure(slices, lens, n, args, batch)
                rows.append(dict(sigma=sigma, batch=batch, ranks=n, ours=round(o, 4), slices=round(c, 4),
                                 budget=BUDGET[n]))
                print(f"{sigma:5.2f} {batch:>10} {n:5d} {o:12.3f} {c:7.2f} {BUDGET[n]:7.2f}", flush=True)
    if not args.small: save('balance', args.machine, unit='busiest rank over the mean', texts=args.texts, bs=args.bs, epochs=args.epochs, rows=rows)


if __name__ == '__main__': main()
