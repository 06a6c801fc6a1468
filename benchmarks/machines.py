"""What several machines cost, on a Ray cluster of this machine and one made of a network namespace
(tests/ray_cluster.py; needs root and Ray).

`call`: seconds from the call of a fit to the end of rank 0's first step, in a block whose actors and workers run,
against the same in a block on this machine, by as many ranks, in turns. The data is small (128 KB); what more of it
adds is in `bytes`. Budget: 0.5 s and the shipping.

`bytes`: what a fit of one step sends for S bytes of data, to 2 x 2 ranks: the bytes that the other machine's card
receives, in multiples of S, what the ranks say to each other (weights at the start, gradients) among them. Budget:
1.05.

`steps`: seconds per training step against a hand-written DDP script under `torchrun --nnodes 2` on two namespaces
(cases, clock and script: throughput.py), one thread per rank. Goal: 0.97 of the script's steps per second. "Kept" is
the script with its memory kept from step to step. In `mlp` fastai's own Python per step
dominates; as many ranks without another host say whether the hosts have a part in it. Both hosts share the cores of
this machine: with two of them one rank on each host is the fair case, and with `--per_node 2` four ranks wait for two
cores.

`links`: all-reduces over gloo between one rank on each host, and the meeting of a step, on the virtual link as it
is and held to 10 and 1 Gbit/s (by `tc`, where the system has it), and the latency and bandwidth of model.py's
formula fitted to them.

`predicted`: that formula for 2 to 64 machines of 8 GPUs at 1 to 400 Gbit/s per machine. A prediction, unproven: nobody
has run it there. Measured is the latency (gloo's over TCP; NCCL's is shorter), the share of the line rate that an
all-reduce has, the start, and what shipping takes. Assumed is the rest: the links within a machine and the case, both
model.py's; that the GPUs of a machine share its card, and that the notebook's card ships the data to all machines.
Speed-up and share of ideal are those of the steps; the fit has start, shipping and bringing back.

    python benchmarks/machines.py [--repeats 3] [--per_node 1] [--cases convnet,mlp] [--machine NAME]
"""
import contextlib, functools, json, statistics, subprocess, sys, time
from pathlib import Path
from torch import nn
from fastddp.all import *
from fastddp.launch.engine import Job

sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'tests'))
import model, throughput
from common import arguments, learner, save, show, summary, take_turns
from launch import Clock, quiet
from namespaces import TwoHosts, ip
from ray_cluster import Cluster, connected

MACHINES, GBITS, GPUS = (2, 4, 8, 16, 32, 64), (1, 10, 25, 100, 400), 8
LIMITS = None, 10, 1    # Gbit/s; None: the link as it is
BURST = 1<<17           # bytes that pass a limit at once


def in_block(stack, learn, launcher, nprocs):
    "`learn` in a block, without output, until `stack` ends"
    for o in learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=nprocs, launcher=launcher):
        stack.enter_context(o)
    return learn


@contextlib.contextmanager
def engine(per_node):
    "`Ray` on the CPU, whose actors and workers run"
    with Ray(per_node=per_node, threads=1, start_timeout=240.) as hosts:
        hosts.place(gpus=[])
        with contextlib.ExitStack() as stack: in_block(stack, quiet(), hosts, 2*per_node).fit(1)
        yield hosts


# Call to first step

def to_first_step(learn):
    called = time.time()
    learn.fit(1)
    return learn.clock.first-called


def call(hosts, n, turns):
    "On the hosts and on this machine, by `n` ranks"
    with contextlib.ExitStack() as stack:
        launchers = {'this machine': Local(gpus=[], threads=1), 'two hosts': hosts}
        learns = {k: in_block(stack, quiet(), o, n) for k, o in launchers.items()}
        for o in learns.values(): o.fit(1)
        times = take_turns({k: functools.partial(to_first_step, o) for k, o in learns.items()}, turns)
    rows = summary(times, 'this machine')
    show(f'Seconds from the call to the first training step in a block, {n} ranks', rows)
    more = statistics.median(times['two hosts'])-statistics.median(times['this machine'])
    return dict(rows=rows, ratios={'seconds more on two hosts': round(more, 3)}, times=times)


# Bytes

def received(net):
    "Bytes that the other machine's card has received"
    card, = json.loads(ip('-n', net.b, '-s', '-j', 'link', 'show', 'eth1'))
    return card['stats64']['rx']['bytes']


def of_size(megabytes, n):
    "A learner with so much data, of which `n` ranks make one step"
    items = (megabytes<<20)//(4*4096)
    return learner(lambda: nn.Linear(4096, 10), (4096,), n=items, bs=items//n, cbs=Clock())


def bytes_of(net, hosts, n, sizes):
    rows = []
    for mb in sizes:
        with contextlib.ExitStack() as stack:
            learn = in_block(stack, of_size(mb, n), hosts, n)
            for which in 'first fit', 'again in the block':
                then, secs = received(net), to_first_step(learn)
                rows.append(dict(case=f'{mb} MB, {which}', received=round((received(net)-then)/(mb<<20), 4),
                                 seconds_to_first_step=round(secs, 3)))
    show(f"Bytes that the other machine's card received over those of the data, {n} ranks", rows)
    last = [o['seconds_to_first_step'] for o in rows[1::2]]     # shared memory is there by then
    per_byte = (last[-1]-last[0])/((sizes[-1]-sizes[0])<<20)/len(hosts.machines)
    most = max(o['received'] for o in rows)
    return dict(rows=rows, ratios={'most, per machine': most, 'seconds per GB and machine': round(per_byte*1e9, 3)})


# Steps

def script(net, name, per_node, env={}):
    "Seconds per step of `throughput.raw` under torchrun on both hosts"
    nodes = net.torchrun(throughput.__file__, '--raw', name, per_node=per_node, env=dict(PYTHONWARNINGS='ignore') | env)
    out, errors, status = next((o for o in nodes if o[2]), nodes[0])
    return throughput.said('torchrun', status, out, errors)[name]


def steps(net, hosts, name, per_node, turns):
    times = take_turns({'script': lambda: script(net, name, per_node),
                        'ours': lambda: throughput.ours(name, 2*per_node, hosts),
                        'ours, no other host': lambda: throughput.ours(name, 2*per_node),
                        'script kept': lambda: script(net, name, per_node, throughput.KEPT)}, turns)
    rows = summary(times, 'script', 1e3)
    show(f'{name}: ms per step, 2 hosts x {per_node} ranks, 1 thread each', rows)
    med = {k: statistics.median(v) for k, v in times.items()}
    ratios = {f'steps per second over {k}': round(m/med['ours'], 3) for k, m in med.items() if k != 'ours'}
    print(ratios)
    return dict(rows=rows, ratios=ratios, times=times)


# Links, and the prediction

def timed(ctx, sizes): return model.timed(sizes), model.meetings()


@contextlib.contextmanager
def held_to(net, gbit):
    "Inside, no more than so many Gbit/s go from each host to the other"
    def tc(do, card, *args): subprocess.run(['tc', *inside[card], 'qdisc', do, 'dev', card, 'root', *args], check=True,
                                            capture_output=True, text=True, timeout=30)
    inside = {net.here: [], 'eth1': ['-n', net.b]}
    with contextlib.ExitStack() as undo:
        for card in inside if gbit else ():
            tc('add', card, 'tbf', 'rate', f'{gbit}gbit', 'burst', str(BURST), 'latency', '50ms')
            undo.callback(tc, 'del', card)
        yield


def links(net, hosts, small):
    "Rows, and what was fitted by limit"
    rows, fits = [], {}
    for gbit in LIMITS:
        name = f'held to {gbit} Gbit/s' if gbit else 'as it is'
        try:
            with held_to(net, gbit):
                secs, meeting = hosts.run(Job.of(timed, model.SIZES[:3] if small else model.SIZES), 2).results[0]
        except subprocess.CalledProcessError as e:
            print(f'{name}: not measured ({e.stderr.strip()})', file=sys.stderr)
            continue
        if gbit: secs = {k: v for k, v in secs.items() if k == 1 or 4*k > 4*BURST}     # what the limit is felt by
        link = fits[gbit] = model.fitted(secs)
        show(f'All-reduce over gloo, a rank on each host, the link {name}', model.shown(secs, link))
        rate = link['bandwidth']*8e-9
        rows.append(dict(case=name, meeting_us=round(meeting*1e6), latency_us=round(link['latency']*1e6, 1),
                         gbit_per_s=round(rate, 2), share_of_the_line=round(rate/gbit, 3) if gbit else ''))
    show('Links, fitted', rows)
    return rows, fits


def predicted(fits, res):
    "For other machines, with what was measured and assumed"
    share = min(1., fits[1]['bandwidth']*8e-9) if 1 in fits else .9
    start = next(o['median'] for o in res['call']['rows'] if o['case'] == 'two hosts')
    sent, per_byte = res['bytes']['ratios'].values()
    known = dict(latency=fits[None]['latency'], share_of_the_line=share, start=start, sent=sent,
                 ship_per_byte=per_byte*1e-9)
    rows = [_predict(n, share*gbit/8e-9, f'{n} machines, {gbit} Gbit/s', known) for n in MACHINES for gbit in GBITS]
    c = model.CASE
    show(f"Predicted, unproven: 10 epochs of {c['items']:,} items by {c['batch']}, {c['compute']} s of computing a "
         f"step, {c['gradients']/1e6:.0f} MB of gradients, {c['data']/1e9:.0f} GB of data, {GPUS} GPUs a machine", rows)
    print(f"\nMeasured here: {known}\nAssumed: {c}, within a machine {model.NVLINK}")
    return dict(rows=rows, measured=known, case=c, nvlink=model.NVLINK, gpus=GPUS)


def _predict(n, rate, name, known):
    "A row, at `rate` bytes per second between machines"
    network = dict(latency=known['latency'], bandwidth=rate/GPUS)
    ship = n*max(known['sent']/rate, known['ship_per_byte'])
    comm = model.over_hosts(n, GPUS, model.CASE['gradients'], network)
    p = model.predict(name, n*GPUS, comm, dict(start=known['start'], ship=ship, back=1/rate),
                      model.meet(n, 0., known['latency']))
    ideal = model.CASE['compute']*1e3/p['step_ms']
    return dict(case=name, gpus=p['ranks'], communicate_ms=p['communicate_ms'], step_ms=p['step_ms'],
                speed_up=round(p['ranks']*ideal, 1), of_ideal=round(ideal, 3),
                ship_s=round(ship*model.CASE['data'], 1), fit_s=p['fit_s'])


def measured(net, args):
    "All parts, as they are saved"
    names, turns, sizes = args.cases.split(','), args.repeats, (64, 256)
    if args.small: names, turns, sizes = names[-1:], 1, (8, 32)
    def of_ranks(hosts, per_node):
        if per_node != args.per_node: return {}
        return dict(call=call(hosts, 2*per_node, 5*turns),
                    steps={o: steps(net, hosts, o, per_node, turns) for o in names})
    with engine(1) as hosts:
        rows, fits = links(net, hosts, args.small)
        res = dict(links=dict(rows=rows)) | of_ranks(hosts, 1)
        if args.small: res['bytes'] = bytes_of(net, hosts, 2, sizes)
    if not args.small:
        with engine(2) as hosts: res |= of_ranks(hosts, 2) | dict(bytes=bytes_of(net, hosts, 4, sizes))
    return res | dict(predicted=predicted(fits, res))


def main():
    args = arguments(__doc__, repeats=3, per_node=1, cases='convnet,mlp')
    with contextlib.ExitStack() as stack:
        try: net = stack.enter_context(TwoHosts())
        except (OSError, subprocess.CalledProcessError) as e: return print(f'no network namespaces here: {e}')
        cluster = Cluster(net)
        stack.callback(cluster.stop)
        cluster.start()
        stack.enter_context(connected(cluster))
        res = measured(net, args)
    if not args.small: save('machines', args.machine, unit='see the columns', per_node=args.per_node, **res)


if __name__ == '__main__': main()
