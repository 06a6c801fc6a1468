"""The tables in benchmarks/README.md, from the results of one machine.

    python benchmarks/render.py [--machine cpu-2core]

Between two comments of the page everything is written anew; what has not been measured is called so.
"""
import argparse, json
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = '<!-- results: rendered by benchmarks/render.py -->', '<!-- end of results -->'


def read(machine):
    "The results of `machine`, by the name of the script"
    return {p.stem: json.loads(p.read_text(encoding='utf-8')) for p in sorted((HERE/'results'/machine).glob('*.json'))}


def value(results, *path):
    "What lies at `path`; a list of rows is entered by the name of its case. None: not measured"
    for o in path:
        if isinstance(results, list): results = {r.get('case'): r for r in results}
        if not isinstance(results, dict) or o not in results: return None
        results = results[o]
    return results


def rows(file, case, column='median'): return file, 'rows', case, column


SHORT = [   # what, where it lies, its unit, the budget, what it is held against and where that lies
    ('call to first training step, helper ready', rows('launch', 'first fit'), 's', 'at most 0.2 s',
     "torch's spawn", rows('launch', 'torch spawn')),
    ('second fit in a block: all but training', rows('launch', 'second fit in a block'), 's', 'at most 0.05 s',
     '', None),
    *((f'{of}: {what}', rows('shapes', case, column), 's', f'at most {most} s', 'an epoch in one process',
       rows('shapes', case, 'local epoch'))
      for of, case, first in (('12,396 zipped tensors', 'zip of tensors', .3),
                              ('a table of 100,000 rows', 'table with strings', .3))
      for what, column, most in (('first fit, all but training', 'first fit beyond training', first),
                                 ('again in a block', 'again in a block, beyond training', .05))),
    ("memory of an array, 4 workers, beyond the notebook's", rows('memory', 'numpy array, 4 workers'), ' x its size',
     'at most 1.1', "torch's spawn, 2 processes", rows('memory', 'torch spawn: numpy array, 2 processes')),
    ('data to the workers, first fit', rows('sync', 'ship, first fit', 'ratio'), ' copies', 'at most 2',
     'a copy into new shared memory', rows('sync', 'one copy into new shared memory', 'ratio')),
    ('data to the workers, second fit', rows('sync', 'ship, second fit', 'ratio'), ' copies', 'at most 2',
     'pickled through a pipe', rows('sync', 'pickled through a pipe', 'ratio')),
    ('weights back', rows('sync', 'back, first fit', 'ratio'), ' copies', 'at most 2', '', None),
    *((f"steps per second over a DDP script's, {o}", ('throughput', o, 'ratios', 'steps_per_second_over_script'), '',
       'at least 0.97', '', None) for o in ('convnet', 'text', 'tabular')),
    ("an MLP's tiny step over that of one process and the communication",
     ('throughput', 'mlp', 'ratios', 'over_learner_step_plus_communication'), '', 'at most 1.03', '', None),
    ('speed-up of training, 2 ranks, convnet', ('throughput', 'convnet', 'ratios', 'speed_up'), '',
     "the script's or more", 'the script', ('throughput', 'convnet', 'ratios', 'speed_up_of_script')),
    ('speed-up of `get_preds`, 2 ranks', ('inference', 'ratios', 'speed-up of get_preds'), '', 'at least 1.8',
     '', None),
    ('two hosts on one machine: call to first training step, in a block',
     ('machines', 'call', 'rows', 'two hosts', 'median'), 's', 'at most 0.5 s', 'the same without other hosts',
     ('machines', 'call', 'rows', 'this machine', 'median')),
    ('two hosts: data over the link to each', ('machines', 'bytes', 'ratios', 'most, per machine'), ' x its size',
     'at most 1.05', '', None),
    ("a job's live display: the notebook's CPU time in percent of the training's time, convnet",
     ('background', 'convnet', 'rows', 'job', 'notebook_percent'), ' %', 'at most 0.5 %', 'bars while the cell waits',
     ('background', 'convnet', 'rows', 'bars', 'notebook_percent')),
    ("two hosts: steps per second over a DDP script's, convnet",
     ('machines', 'steps', 'convnet', 'ratios', 'steps per second over script'), '', 'at least 0.97', '', None)]


def said(results, path, unit):
    v = value(results, *path) if path else None
    return 'not measured' if v is None else f'{v:.3g}{" " if unit == "s" else ""}{unit}'


def short_table(results):
    lines = ['| what | measured | aim | others |', '|---|---|---|---|']
    for what, path, unit, aim, peer, peer_path in SHORT:
        other = f'{peer}: {said(results, peer_path, unit)}' if peer else ''
        lines.append(f'| {what} | {said(results, path, unit)} | {aim} | {other} |')
    return '\n'.join(lines)


def table(rows):
    names = list(rows[0])
    lines = [names, *([str(r.get(n, '')) for n in names] for r in rows)]
    head, *body = ['| '+' | '.join(o)+' |' for o in lines]
    return '\n'.join([head, '|'+'---|'*len(names), *body])


def ratios(content):
    found = content.get('ratios')
    return '\n\n'+', '.join(f'{k}: {v}' for k, v in found.items()) if isinstance(found, dict) else ''


def tables(content):
    "Every list of rows in a result file with its heading, however deep"
    if not isinstance(content, dict): return
    found = content.get('rows')
    if isinstance(found, list) and found and isinstance(found[0], dict): yield '', table(found)+ratios(content)
    for k, v in content.items():
        for name, t in tables(v): yield f'{k} {name}'.strip(), t


def full(results, machine):
    parts = [f'All figures: `results/{machine}`.', short_table(results)]
    for name, content in results.items():
        about = content.get('about', {})
        where = f"torch {about.get('torch')}, {about.get('cores')} cores, {about.get('date')}"
        unit = f"{content['unit']}; " if content.get('unit') else ''
        parts.append(f'### {name} ({unit}{where})')
        for title, t in tables(content): parts += [f'**{title}**', t] if title else [t]
    return '\n\n'.join(parts)


def between(text, new, marks=(BEGIN, END)):
    "`text` with `new` between the two comments"
    begin, end = marks
    head, _, rest = text.partition(begin)
    return f'{head}{begin}\n\n{new}\n\n{end}{rest.partition(end)[2]}' if rest else text


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--machine', default='cpu-2core')
    args = p.parse_args()
    results, page = read(args.machine), HERE/'README.md'
    page.write_text(between(page.read_text(encoding='utf-8'), full(results, args.machine)), encoding='utf-8')


if __name__ == '__main__': main()
