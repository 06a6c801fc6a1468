"""Runs the workflows of libraries (tests/libraries) and makes docs/works_with.md of what came out.

    python tools/works_with.py [NAME ...]       # all files of tests/libraries, or those with these names

Each file of tests runs in a process of its own: libraries change fastai when they are imported. With names, the rows of
other libraries stay as they are. Where a library needs an older fastcore, set OLD to the Python of an environment with
fastai 2.7.19: what this one can't import is tried there."""
import datetime, json, os, re, subprocess, sys, tempfile
from pathlib import Path
from xml.etree import ElementTree

root = Path(__file__).resolve().parent.parent
RESULTS, PAGE = root/'tests'/'libraries'/'results.json', root/'docs'/'works_with.md'

HEAD = """# Works with

Libraries that people use with fastai. Each workflow is the library's own, small, with random weights and made-up \
data. It runs in one process and on 2 workers over the same global batches (`make test-libraries`): weights, losses, \
metrics and what else the library makes are equal up to float32's rounding, unless the last column says otherwise. \
This page is made of the tests in [tests/libraries](../tests/libraries).

"""


def run(path, python):
    "Run a file of tests; return its rows. A file that is skipped as a whole gives one row, with the reason"
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp)/'report.xml'
        cmd = [python, '-W', 'ignore', '-m', 'pytest', '-q', '-m', 'libraries', path, f'--junitxml={report}']
        env = {**os.environ, 'PYTHONPATH': str(root)}
        done = subprocess.run(cmd, cwd=root, env=env, capture_output=True, text=True)
        if not report.exists(): raise SystemExit(f'{path}: no report\n{done.stdout[-3000:]}{done.stderr[-3000:]}')
        cases = [*ElementTree.parse(report).iter('testcase')]
    rows = [row_of(o) for o in cases]
    if any(o['result'] == 'differs' for o in rows): print(done.stdout[-6000:], flush=True)
    return rows


def row_of(case):
    "What the report says of one test"
    row = {o.get('name'): o.get('value') for o in case.iter('property')}
    skipped = case.find('skipped')
    bad = case.find('failure') is not None or case.find('error') is not None
    if skipped is not None and skipped.get('type') == 'pytest.xfail':
        row['result'] = f"known to differ: {skipped.get('message')}"
    elif skipped is not None:
        text = skipped.get('message') if 'collection skipped' not in (skipped.get('message') or '') else skipped.text
        row['result'] = re.sub(r"^.*Skipped: |'\)$|\"\)$", '', (text or '').strip())
    else: row['result'] = 'differs' if bad else 'equal'
    return row


def merged(rows):
    "One row for each workflow: the cases of a parameter are together"
    res = {}
    for o in rows:
        key = o.get('workflow', o['result'])
        if key not in res or o['result'] != 'equal': res[key] = o
    return [*res.values()]


def versions(python):
    code = 'from importlib.metadata import version as v; print(v("fastai"), v("fastcore"), v("torch").split("+")[0])'
    return subprocess.run([python, '-c', code], capture_output=True, text=True, check=True).stdout.split()


def page(results):
    def cell(texts): return '; '.join(filter(None, map(str, texts))).replace('|', '\\|').replace('<', '&lt;')
    rows = ['| library | workflows | to know |', '|---|---|---|']
    missing = []
    for name in sorted(results):
        found = results[name]
        ran = [o for o in found['rows'] if 'workflow' in o]
        missing += [f"- {cell([o['result']])}" for o in found['rows'] if 'workflow' not in o]
        if not ran: continue
        library = f"{ran[0]['library']} {ran[0]['version']}" + (f" (fastai {found['fastai']})" if found['old'] else '')
        differ = [f"{o['workflow']}: {o['result']}" for o in ran if o['result'] != 'equal']
        know = [*dict.fromkeys(o['know'].rstrip('.') for o in ran)]
        rows.append(f"| {library} | {cell(o['workflow'] for o in ran)} | {cell([*differ, *know])} |")
    new = [o for o in results.values() if not o['old']] or [*results.values()]
    dates = sorted({o['date'] for o in results.values()})
    about = 'Last run: {}, fastai {fastai}, fastcore {fastcore}, torch {torch}.\n\n'.format(dates[-1], **new[0])
    rest = '\n\nNot tried, since they cannot be imported beside that fastai:\n\n' if missing else ''
    rest += '\n'.join(missing)
    return HEAD + about + '\n'.join(rows) + rest + '\n'


def main(names):
    files = sorted((root/'tests'/'libraries').glob('test_*.py'))
    if names: files = [o for o in files if o.stem[5:] in names]
    old, failed = os.environ.get('OLD'), []
    for o in files:
        python, rows = sys.executable, run(o, sys.executable)
        if old and not any('workflow' in r for r in rows) and 'not installed' not in rows[0]['result']:
            again = run(o, old)
            if any('workflow' in r for r in again): python, rows = old, again
        fastai, fastcore, torch = versions(python)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[o.stem[5:]] = dict(rows=merged(rows), old=python == old, fastai=fastai, fastcore=fastcore, torch=torch,
                                   date=f'{datetime.date.today():%Y-%m-%d}')
        failed += [o.stem[5:]]*any(r['result'] == 'differs' for r in rows)
        print(f'{o.stem[5:]}:', ', '.join(r['result'] for r in merged(rows)), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True)+'\n')
        PAGE.write_text(page(results), encoding='utf-8')
    if failed: raise SystemExit(f"these differ: {', '.join(failed)}")


if __name__ == '__main__': main(sys.argv[1:])
