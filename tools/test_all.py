"""All tests there are, part by part, for `make test-all`; goes on after a part that fails.

    python tools/test_all.py [PART ...]     # full ray v1 oldest kaggle, unless said otherwise

A part is a make target: `full` is `make test-full`. At the end, and in build/test-all.md, a page of
what ran, how long, with what result, on which commit. Exits with 1 if anything failed.
"""
import collections, os, platform, subprocess, sys, time
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

root = Path(__file__).resolve().parent.parent
BUILD = root/'build'
PARTS = 'full', 'ray', 'v1', 'oldest', 'kaggle'
COUNTS = 'passed', 'failed', 'skipped', 'xfailed'


def git(*args):
    res = subprocess.run(['git', *args], cwd=root, capture_output=True, text=True)
    return res.stdout.strip()


def outcome(case):
    "What a test came to, and what it said"
    for o in case:
        if o.tag in ('failure', 'error'): return 'failed', o.get('message') or ''
        if o.tag == 'skipped':
            kind = 'xfailed' if o.get('type') == 'pytest.xfail' else 'skipped'
            return kind, o.get('message') or ''
    return 'passed', ''


def file_of(case):
    "`same_answer.test_parity`, of a class or not"
    names = (case.get('classname') or '').split('.')
    while len(names) > 1 and not names[-1].startswith('test_'): names.pop()
    return '.'.join(names[1:] if names[0] == 'tests' else names)


def read_report(path):
    "`(file, test, what it came to, what it said, seconds)` of each test of a report"
    if not path.exists(): return []
    return [(file_of(c), c.get('name'), *outcome(c), float(c.get('time') or 0))
            for c in ET.parse(path).getroot().iter('testcase')]


def run(part):
    "`(exit code, seconds, tests)` of a part"
    report, began = BUILD/f'test-{part}.xml', time.monotonic()
    report.unlink(missing_ok=True)
    print(f'\n== make test-{part}', flush=True)
    cmd = ['make', f'test-{part}', 'SELECT=', f'REPORT={report}']
    code = subprocess.run(cmd, cwd=root).returncode
    return code, time.monotonic()-began, read_report(report)


def table(head, rows):
    return '\n'.join(f'| {" | ".join(map(str, o))} |' for o in (head, ['---']*len(head), *rows))


def counted(tests):
    n = collections.Counter(o[2] for o in tests)
    return [n[k] for k in COUNTS]


def page(done, commit, machine):
    "`done`: part -> what `run` gives"
    results = {k: f'FAILED ({code})' if code else 'passed' for k, (code, _, _) in done.items()}
    rows = [(f'test-{k}', results[k], *counted(tests), f'{secs/60:.1f}')
            for k, (_, secs, tests) in done.items()]
    parts = table(['part', 'result', *COUNTS, 'minutes'], rows)
    text = ['# All tests', f'Commit {commit}. {machine}.', parts]
    for part, (_, _, tests) in done.items():
        files = {}
        for o in tests: files.setdefault(o[0], []).append(o)
        rows = [(k, *counted(v), f'{sum(o[4] for o in v):.0f}') for k, v in sorted(files.items())]
        text += [f'## test-{part}', table(['file', *COUNTS, 'seconds'], rows)]
        for kind in 'failed', 'skipped', 'xfailed':
            said = [f'- {f}: {name}: {" ".join(why.split())[:200]}'
                    for f, name, what, why, _ in tests if what == kind]
            if said: text.append('\n'.join([f'{kind.capitalize()}:', '', *said]))
    return '\n\n'.join(text)+'\n'


def main(*parts):
    BUILD.mkdir(exist_ok=True)
    commit = git('rev-parse', 'HEAD')+(', with changes' if git('status', '--porcelain') else '')
    began, done = time.strftime('%Y-%m-%d %H:%M'), {}
    libs = ', '.join(f'{o} {version(o)}' for o in ('fastai', 'torch'))
    machine = f'{began}, {os.cpu_count()} cores, Python {platform.python_version()}, {libs}'
    for part in parts or PARTS:
        done[part] = run(part)
        (BUILD/'test-all.md').write_text(page(done, commit, machine), encoding='utf-8')
    print('\n'+page(done, commit, machine))
    return any(code for code, _, _ in done.values())


if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
