"""`make gpu` can't run without a GPU, but its checks can: a dry run on the CPU, and what they are made of."""
import json, os, re, subprocess, sys
from pathlib import Path
import pytest, torch
from fastddp.all import CantDistribute, Local
from fastddp.fastai2 import learner
from fastddp.launch import options as options_of

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'benchmarks'))
from gpu import claims, machine
from gpu.table import Table
from gpu.waits import HostReads

sys.path.remove(str(root/'benchmarks'))
import simulated_gpu.build


def dry(tmp_path, *args):
    "What a dry run wrote, as `(exit status, JSON, page)`"
    out = tmp_path/'found'
    done = subprocess.run([sys.executable, str(root/'tools'/'gpu.py'), '--dry', '--out', str(out), *args], cwd=tmp_path,
                          capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(root)))
    assert out.with_suffix('.json').exists(), done.stderr[-3000:]
    found = json.loads(out.with_suffix('.json').read_text())
    return done.returncode, found, out.with_suffix('.md').read_text()


@pytest.mark.full
def test_a_section_in_a_dry_run(tmp_path):
    status, found, page = dry(tmp_path, '--only', 'stop')
    rows = [o['ok'] for o in found['rows'] if o['section'] == 'stop']
    assert status == 0 and True in rows and False not in rows, found
    assert found['dry'] and 'A dry run without a GPU' in page and '| holds |' in page


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_dry_run_from_beginning_to_end(tmp_path):
    status, found, _ = dry(tmp_path)
    sections = {o['section'] for o in found['rows']}
    assert sections == {'first', 'promises', 'parity', 'precision', 'waits', 'speed', 'memory', 'stop'}
    assert status == 0 and not [o for o in found['rows'] if o['ok'] is False]
    assert [o for o in claims.CLAIMS if claims.missing(o, found['rows'], dry=True)] == []


def test_what_the_pages_say_of_gpus_is_a_row_or_unproven():
    "Each sentence about GPUs there has a claim in benchmarks/gpu/claims.py, or is among NO_CLAIMS"
    readme = (root/'README.md').read_text(encoding='utf-8')
    text = '\n'.join((root/o).read_text(encoding='utf-8') for o in claims.PAGES)
    said = [*(o for c in claims.CLAIMS for o in c.said), *claims.NO_CLAIMS]
    assert [o for o in said if o not in text] == []
    for o in said: text = text.replace(o, '')
    assert [line for line in text.split('\n') if re.search('GPU|CUDA|[Nn]ccl|NCCL', line)] == []
    table = claims.table(claims.results())
    assert table in (root/'docs'/'gpus.md').read_text(encoding='utf-8'), 'python benchmarks/gpu/claims.py'
    assert ('Nothing has been run on a GPU yet' in readme) == (not claims.results())


def test_each_claim_has_a_test_on_simulated_gpus_or_a_reason():
    text = '\n'.join(o.read_text(encoding='utf-8') for o in (root/'tests'/'simulated_gpu').glob('test_*.py'))
    named = {o for c in claims.CLAIMS for o in c.tests}
    assert [o for o in named if f'def {o}(' not in text] == []
    assert [c.what for c in claims.CLAIMS if not (c.tests or c.real)] == []


@pytest.mark.full
def test_all_sections_on_simulated_gpus(tmp_path):
    if why := simulated_gpu.build.why_not(): pytest.skip(why)
    out = tmp_path/'found'
    command = [sys.executable, str(root/'tools'/'gpu.py'), '--simulated', '--out', str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | dict(PYTHONPATH=str(root)))
    found = json.loads(out.with_suffix('.json').read_text())
    assert done.returncode == 0 and found['dry'], done.stderr[-3000:]
    rows = {o['what']: o['ok'] for o in found['rows']}
    assert rows['2 ranks, batch norm synchronised: weights of one process to 1e-4'], rows
    assert rows['interrupt within a step: no memory left'] and False not in rows.values(), rows


def row(what, ok): return dict(section='', what=what, ok=ok, detail='')


def test_a_claim_holds_by_its_rows_only():
    claim, page = claims.Claim('x', (r'\d+ ranks: a', 'b')), Path('1-y.md')
    def state(*rows): return claims.state(claim, {page: dict(gpus=1, rows=rows)} if rows else {})
    assert state() == state(row('b', True)) == state(row('b', True), row('2 ranks: a', None)) == 'unproven'
    assert state(row('b', True), row('2 ranks: a', True)) == 'holds on [1-y](../benchmarks/results/gpu/1-y.md)'
    assert state(row('b', False)).startswith('**broken**')
    assert claims.state(claims.Claim('x', ()), {page: dict(gpus=1, rows=[row('b', True)])}) == 'unproven'


@pytest.mark.parametrize('gpus,ends', [(1, ' | holds on [1-y](../benchmarks/results/gpu/1-y.md) | unproven |'),
                                       (8, ' | unproven | holds on [1-y](../benchmarks/results/gpu/1-y.md) |')])
def test_the_table_tells_one_gpu_from_several(gpus, ends):
    rows = [row('get_preds: those of this process, in order', True), row('validate: that of this process', True),
            row('tta: x', True), row('lr_find: x', True)]
    table = claims.table({Path('1-y.md'): dict(gpus=gpus, rows=rows)})
    line, = [o for o in table.split('\n') if o.startswith('| `get_preds`')]
    assert line.endswith(ends), line


def test_a_dry_run_proves_no_claim(tmp_path):
    for name, dry in {'a': True, 'b': False}.items():
        (tmp_path/f'{name}.json').write_text(json.dumps(dict(dry=dry, rows=[row('b', True)])))
    assert [p.name for p in claims.results(tmp_path)] == ['b.md']


@pytest.mark.full
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, 'benchmarks/gpu_check.py'], cwd=root, capture_output=True, text=True,
                          env=os.environ | dict(PYTHONPATH=str(root), CUDA_VISIBLE_DEVICES=''))
    assert done.returncode == 1 and 'no GPU is visible here; `--dry` runs' in done.stderr


def place_of(options):
    "`(workers, GPU of each)` of a block with these options, which starts nothing"
    defaults = learner.OPTIONS.defaults
    with options_of.engine_for(defaults | options, options) as (_, n, gpus): return n, gpus


def test_the_checks_of_two_gloo_ranks_may_share_a_gpu(monkeypatch):
    "A machine with one GPU runs them by gloo; NCCL refuses two ranks of one GPU, so we do, too"
    monkeypatch.setattr(machine, 'DRY', False)
    monkeypatch.setattr(options_of.group, 'n_gpus', lambda: 1)
    assert place_of(machine.ranks(2, shared=True)) == (2, [0, 0])
    assert place_of(machine.ranks(1)) == (1, [0])
    for launcher in Local(gpus=[0, 0]), Local(gpus=[0, 0], backend='nccl'):
        with pytest.raises(CantDistribute, match='name each once'): place_of(dict(launcher=launcher))


def test_a_broken_section_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, 'DRY', True)
    table = Table()
    with table.of('first'): 1/0
    with table.of('second'): table.add('a | b', True, 3)
    assert [o['what'] for o in table.broken] == ['first ran to its end'] and len(table.rows) == 4
    table.save(tmp_path/'x')
    page = (tmp_path/'x.md').read_text()
    assert '**broken**' in page and 'ZeroDivisionError' in page and page.count('## ') == 2


def test_reads_to_the_host_are_noticed():
    with HostReads('cpu') as reads:
        x = torch.ones(3)
        (x*2).sum()
        assert reads.found == []
        x.sum().item()
        torch.equal(x, x)
        bool(x[0] > 0)
    assert reads.found == ['aten._local_scalar_dense', 'aten.equal', 'aten._local_scalar_dense']


def test_copies_from_a_device_are_noticed():
    with HostReads('meta') as reads:
        x = torch.ones(3, device='meta')
        x.copy_(torch.empty(3))
        x.copy_(torch.empty(3), non_blocking=True)
    assert reads.found == ['aten.copy_']
