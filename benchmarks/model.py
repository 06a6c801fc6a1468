"""What a fit costs, as a formula with parameters fitted from this machine's runs, and what it predicts for others.

    fit(N) = start + ship + epochs x (steps x step(N) + keep) + back
    step(N) = compute + meet(N) + communicate(N, gradients) - hidden
    hidden = overlap x communicate(N, gradients), but at most the time of the backward pass, 2/3 of compute
    communicate(N, bytes) = 2 (N-1) x latency + 2 (N-1)/N x bytes / bandwidth                     (a ring all-reduce)
    meet(N) = meeting on one host's board + one exchange of the board's rows between hosts, over gloo

The meeting of a step (before its backward pass) is hidden by nothing. Measured here are the meeting of two ranks on
one board, and the same exchange of rows by a gloo all-reduce; assumed is how long gloo takes between hosts.

start, ship, keep and back come from launch.json and sync.json of this machine, latency and bandwidth from
all-reduces over gloo that run here. What stands for other machines is assumed, is printed beside the prediction,
and is unproven: nobody has run it there.

    python benchmarks/model.py [--machine NAME]
"""
import json
import numpy as np
from fastddp.all import *
from common import HERE, arguments, save, show

SIZES = [1, 1 << 14, 1 << 18, 1 << 20, 1 << 22]    # floats
# a model of 25 million weights in single precision, of 0.1 s per step (ResNet-50 by 64 images, about),
# 10,000 steps of 64 in all
CASE = dict(compute=.1, gradients=100e6, items=640_000, batch=64, overlap=.7, data=4e9)
NVLINK = dict(latency=10e-6, bandwidth=150e9)      # of one all-reduce within a host
NETWORK = dict(latency=30e-6, bandwidth=12e9)      # between hosts, per GPU: 100 Gbit/s each
# an all-reduce of a few numbers over gloo between two hosts; others measured up to 10 ms (vllm-project/vllm#24105)
BETWEEN_HOSTS = dict(latency=150e-6, slow=10e-3)


def timed(sizes):
    "On each rank of a group: median seconds of an all-reduce, by number of floats"
    import statistics, time, torch, torch.distributed as dist
    res = {}
    for n in sizes:
        t, secs = torch.ones(n), []
        for _ in range(30):
            at = time.perf_counter()
            dist.all_reduce(t)
            secs.append(time.perf_counter()-at)
        res[n] = statistics.median(secs[5:])
    return res


def meetings():
    "On each rank of a group: median seconds of a meeting at the board"
    import statistics, time
    from fastddp.base import board
    meet, times = board.group_board().meet, []
    for _ in range(2000):
        at = time.perf_counter()
        meet([1.])
        times.append(time.perf_counter()-at)
    return statistics.median(times[100:])


def all_reduces(sizes):
    "The same in a `ranch`: by number of floats, and of a meeting"
    from fastddp.ranch import TorchDDPCtx
    with TorchDDPCtx(use_gpu=False, num_threads=1): return timed(sizes), meetings()


def fitted(secs, n=2):
    "Latency and bandwidth of `communicate` that explain the medians best, each weighted by its own size"
    sizes, took = np.array([4.*k for k in secs]), np.array([*secs.values()])
    a = np.stack([np.full(len(sizes), 2.*(n-1)), 2*(n-1)/n*sizes], 1)/took[:, None]
    lat, per_byte = np.linalg.lstsq(a, np.ones(len(sizes)), rcond=None)[0]
    return dict(latency=float(max(lat, 0)), bandwidth=float(1/per_byte))


def communicate(n, nbytes, latency, bandwidth): return 2*(n-1)*latency + 2*(n-1)/n*nbytes/bandwidth


def over_hosts(hosts, per_host, nbytes, network=NETWORK, nvlink=NVLINK):
    "All-reduce inside each host, then of each GPU's part between hosts; `network` is what one GPU has of it"
    return communicate(per_host, nbytes, **nvlink) + communicate(hosts, nbytes/per_host, **network)


def meet(hosts, board, between):
    "Seconds of a step's meeting; `between`: of an all-reduce of a few numbers between two hosts"
    # a ring of all hosts takes as many turns as there are hosts
    return board + (2*board + (hosts-1)*between if hosts > 1 else 0.)


def rows_of(name, machine):
    path = HERE/'results'/machine/f'{name}.json'
    return {r['case']: r for r in json.loads(path.read_text())['rows']} if path.exists() else {}


def around(machine):
    "Seconds around the steps: start of a fit, and per byte to ship and to bring back"
    launch, sync = rows_of('launch', machine), rows_of('sync', machine)
    nbytes = json.loads((HERE/'results'/machine/'sync.json').read_text())['bytes'] if sync else 1
    rate = lambda case: sync[case]['median']/nbytes if sync else 0.
    start = launch.get('first fit', dict(median=.2))['median']
    return dict(start=start, ship=rate('ship, first fit'), back=rate('back, first fit'))


def predict(name, n, comm, fixed, meeting, epochs=10):
    c = CASE
    step = c['compute'] + meeting + comm - min(c['overlap']*comm, 2/3*c['compute'])
    steps = c['items']/c['batch']/n
    total = fixed['start'] + fixed['ship']*c['data'] + epochs*steps*step + fixed['back']*c['gradients']
    alone = epochs*c['items']/c['batch']*c['compute']
    return dict(case=name, ranks=n, communicate_ms=round(comm*1e3, 2), meet_ms=round(meeting*1e3, 3),
                step_ms=round(step*1e3, 1), fit_s=round(total),
                speed_up=round(alone/total, 1), of_ideal=round(alone/total/n, 3))


def shown(secs, link):
    "Rows of `timed` beside what the formula makes of them"
    return [dict(bytes=4*n, measured_ms=round(s*1e3, 3), model_ms=round(communicate(2, 4*n, **link)*1e3, 3))
            for n, s in secs.items()]


def main():
    args = arguments(__doc__)
    secs, board = ranch(2, all_reduces, SIZES[:3] if args.small else SIZES, caller_rank=None)[0]
    here, fixed = fitted(secs), around(args.machine)
    show('All-reduce over gloo, 2 ranks', shown(secs, here))
    print(f'A meeting of 2 ranks on one board: {board*1e6:.0f} us')
    eight, nbytes = over_hosts(8, 8, CASE['gradients']), CASE['gradients']
    near, far = (meet(8, board, BETWEEN_HOSTS['latency']), board + BETWEEN_HOSTS['slow'])
    rows = [predict('this machine, gloo', 2, communicate(2, nbytes, **here), fixed, board),
            predict('8 GPUs of one host (assumed NVLink)', 8, communicate(8, nbytes, **NVLINK), fixed, board),
            predict('64 GPUs of 8 hosts (assumed network)', 64, eight, fixed, near),
            predict('64 GPUs of 8 hosts, gloo as slow as reported', 64, eight, fixed, far)]
    show('Predicted, unproven: 10 epochs of 640,000 items by 64, 0.1 s of computing a step, 100 MB of gradients, '
         '4 GB of data', rows)
    if not args.small:
        save('model', args.machine, unit='see the columns', fitted=here, board=board, fixed=fixed, case=CASE,
             nvlink=NVLINK, network=NETWORK, between_hosts=BETWEEN_HOSTS, rows=rows)


if __name__ == '__main__': main()
