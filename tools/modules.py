"""The table of modules, a page of the site: each one, the `>` line of its notebook, and its test."""
import json
from pathlib import Path

root = Path(__file__).resolve().parent.parent
HEAD = '''# Modules

Each module is exported from the notebook of the same name, which is its first test; the last \
column names the file in [tests](../tests) that most likely fails when the module breaks.
'''
# Module -> its test file; by the folder where a module isn't listed
TESTS = {
    'base': 'faults/test_faults.py', 'base/errors': 'test_troubles.py', 'base/checks': 'test_mistakes.py',
    'base/scoped': 'test_interrupt.py', 'base/device': 'test_gpu_check.py', 'base/group': 'same_answer/test_parity.py',
    'base/forks': 'faults/test_hangs.py', 'base/board': 'same_answer/test_on_device.py',
    'base/rng': 'same_answer/test_streams.py',
    'payload': 'comes_back/test_comes_back.py',
    'payload/blame': 'test_refusals.py', 'payload/buffers': 'process/test_workers.py',
    'payload/columns': 'payload/test_shapes.py',
    'payload/reducers': 'comes_back/test_warm.py',
    'payload/patches': 'comes_back/test_first_cells.py', 'payload/pairs': 'comes_back/test_first_cells.py',
    'payload/pickling': 'comes_back/test_warm.py',
    'payload/sending': 'test_refusals.py', 'payload/models': 'comes_back/test_torch_models.py',
    'payload/state': 'comes_back/test_comes_back.py', 'payload/kinds': 'payload/test_one_graph.py',
    'payload/places': 'payload/test_one_graph.py', 'payload/changes': 'comes_back/test_objects.py',
    'payload/notes': 'payload/test_kept.py',
    'output': 'output/test_capture.py',
    'output/streams': 'output/test_forks.py',
    'launch/background': 'launch/test_background.py',
    'output/replay': 'output/test_lines.py',
    'shard': 'shard/test_data.py', 'shard/loss': 'same_answer/test_cases.py',
    'shard/whole': 'same_answer/test_cases.py', 'shard/losses': 'same_answer/test_losses.py',
    'shard/loss_call': 'same_answer/test_losses.py',
    'shard/gradients': 'same_answer/test_parity.py',
    'shard/same_model': 'same_answer/test_drift.py',
    'process': 'faults/test_faults.py', 'process/helper': 'test_start.py',
    'launch': 'test_start.py', 'launch/report': 'launch/test_report.py', 'launch/rank': 'faults/test_faults.py',
    'launch/held_gpus': 'cluster/test_held_gpus.py', 'launch/worker_launcher': 'test_interrupt.py',
    'launch/monitor': 'launch/test_monitor.py',
    'launch/engine': 'same_answer/test_parity.py',
    'launch/options': 'test_mistakes.py', 'launch/session': 'comes_back/test_comes_back.py',
    'launch/training': 'test_scripts.py', 'launch/unsent': 'comes_back/test_around_a_fit.py',
    'launch/functions': 'launch/test_ranch.py', 'launch/caller': 'launch/test_caller.py',
    'machines': 'machines/test_ray.py',
    'cluster': 'cluster/test_magics.py',
    'fastai2': 'same_answer/test_parity.py',
    'fastai2/loaders': 'shard/test_data.py', 'fastai2/together': 'same_answer/test_decisions.py',
    'fastai2/metrics': 'same_answer/test_metrics.py', 'fastai2/step': 'same_answer/test_cases.py',
    'fastai2/callbacks': 'apps/test_callbacks.py', 'fastai2/snapshot': 'comes_back/test_comes_back.py',
    'fastai2/resume': 'comes_back/test_resume.py',
    'fastai2/as_one': 'apps/test_callbacks.py',
    'fastai2/inference': 'test_inference.py',
    'fastai2/in_place': 'test_scripts.py',
    'fastai2/session': 'comes_back/test_warm.py', 'fastai2/learner_job': 'launch/test_background.py',
    'fastai2/learner': 'test_shift_tab.py',
    'fastai2/check': 'same_answer/test_check.py', 'fastai2/bench': 'launch/test_bench.py',
    'fastai2/clock': 'launch/test_report.py', 'fastai2/events': 'same_answer/test_decisions.py',
    'fastai1': 'v1/test_v1_fit.py',
    'fastai1/validation': 'v1/test_v1_whole_batches.py', 'fastai1/callbacks': 'v1/test_v1_callbacks.py',
    'fastai1/snapshot': 'v1/test_v1_comes_back.py', 'fastai1/session': 'v1/test_v1_life.py',
    'fastai1/in_place': 'v1/test_v1_scripts.py', 'fastai1/learner': 'v1/test_v1_mistakes.py',
    '': 'test_start.py', 'ranch': 'launch/test_ranch.py', 'doctor': 'test_doctor.py',
    'magics': 'cluster/test_magics.py'}


def numbered(nbs=root/'nbs'):
    "The numbered notebooks, in reading order"
    return sorted(nbs.glob('**/[0-9]*_*.ipynb'), key=lambda o: int(o.name.split('_')[0]))


def sentence(path):
    "The `>` line of a notebook"
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    lines = [o for c in cells if c['cell_type'] == 'markdown' for o in ''.join(c['source']).split('\n')]
    return next((o[2:] for o in lines if o.startswith('> ')), '')


def folder_of(path): return path.relative_to(root/'nbs').parent.as_posix().strip('.')


def module_of(path): return f"{folder_of(path)}/{path.stem.partition('_')[2]}".strip('/')


def render():
    parts, last = [HEAD], None
    for path in numbered():
        folder, module = folder_of(path), module_of(path)
        if folder != last: parts.append(f'\n## {folder or "front doors"}\n\n| module | | test |\n|---|---|---|\n')
        last, test = folder, TESTS.get(module, TESTS[folder])
        page = f'[{path.stem.partition("_")[2]}](../{path.relative_to(root).as_posix()})'
        parts.append(f'| {page} | {sentence(path)} | [{test}](../tests/{test}) |\n')
    return ''.join(parts)

