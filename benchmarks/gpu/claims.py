"""What our pages say about GPUs, and the rows of gpu_check.py's page by which each claim stands or falls.

    python benchmarks/gpu/claims.py

writes the table of them into docs/gpus.md: where a claim held, by the pages in benchmarks/results/gpu, or that it
is unproven.
"""
import json, re, sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT/'benchmarks'/'results'/'gpu'
PAGES = 'README.md', 'docs/guide.md', 'docs/how_it_works.md'
BEGIN, END = '<!-- gpus: rendered by benchmarks/gpu/claims.py -->', '<!-- end of gpus -->'


class Claim(NamedTuple):
    what: str           # As the table says it
    rows: tuple         # Expressions, each for a row at least; none: nothing checks it
    said: tuple = ()    # Elsewhere on the pages (`PAGES`), in these words
    tests: tuple = ()   # Of tests/simulated_gpu, which hold it on simulated GPUs
    real: str = ''      # Why it needs a real one, wholly or in part


ALL = r'\d+ ranks'
CLAIMS = [
    Claim('`learn.distrib_fit_one_cycle(5)` trains on all visible GPUs, one process for each',
          (f'{ALL}, fit 1: device of each rank', f'{ALL}, fit 1: one context per worker, on its own GPU'),
          ('on all your GPUs', 'and more than one GPU. This', 'one process for each GPU', 'all visible GPUs;',
           'over NCCL on GPUs and over gloo on the CPU', 'train your learner on all GPUs'),
          tests=('test_each_rank_uses_its_gpu_only',)),
    Claim('`gpus=[3, 1]`: exactly these, in this order', ('the last two GPUs in reverse, fit 1: device of each rank',),
          ('these two GPUs', '`gpus=None`', 'exactly these GPUs, in this order'),
          tests=('test_each_rank_uses_its_gpu_only',)),
    Claim('the notebook may have used its GPU before', (r'1 \w+ rank, fit 1: device of each rank',),
          ('when you have used the GPU already', 'The notebook may have used its GPU before',
           'has never touched CUDA'),
          tests=('test_gradients_come_back_beside_their_parameters', 'test_two_jobs_on_different_gpus'),
          real='a context of CUDA and a fork'),
    Claim('the same parameters come back, on their GPU, and train on there',
          (r'1 \w+ rank: the same parameters, back on .*', r'1 \w+ rank: trains on in this process',
           f'{ALL}: the same parameters, back on .*'),
          tests=('test_the_answer_of_one_process', 'test_what_a_callback_keeps')),
    Claim('the workers leave nothing on a GPU', (r'1 \w+ rank: GPU memory afterwards as before',
                                               f'{ALL}: GPU memory afterwards as before'),
          tests=('test_workers_of_a_block_keep_nothing_on_their_gpus',),
          real='memory of contexts and kernels'),
    Claim("while workers train, the notebook's copy of the model is on the CPU",
          ("the notebook's copy lies on the CPU while workers train",),
          ('The notebook keeps a CUDA context, usually on GPU 0',),
          tests=('test_while_workers_train_the_notebook_holds_nothing_on_its_gpu',)),
    Claim('N GPUs with batch b are one with batch N·b, in float32 and in bf16',
          (f'{ALL}, float32 without TF32: .*', f'{ALL}, bf16: .*'), ('The same answer on N GPUs',),
          tests=('test_the_answer_of_one_process', 'test_mixed_precision'),
          real='rounding of its kernels'),
    Claim('one batch norm for all GPUs', (f'{ALL}, batch norm synchronised: .*',),
          tests=('test_batch_norm_is_that_of_one_process', 'test_frozen_batch_norms_stay_frozen')),
    Claim('`to_fp16`, `to_bf16`, gradient clipping, channels last and `torch.compile` work',
          tuple(f'{o}, two ranks: trains' for o in ('to_fp16', 'to_bf16', 'to_fp16 with gradient clipping',
                                                    'channels last', 'torch.compile')),
          tests=('test_mixed_precision',
                 'test_where_the_loss_scale_overflows_on_one_rank_all_skip_the_step',
                 'test_the_loss_scale_goes_on_after_a_resume',
                 'test_the_answer_of_one_process'),
          real='channels last and `torch.compile`: its kernels'),
    Claim('`get_preds`, `validate`, `tta` and `lr_find`',
          ('get_preds: those of this process, in order', 'validate: that of this process', 'tta: .*', 'lr_find: .*'),
          tests=('test_predictions_validations_and_lr_find',)),
    Claim('a step waits for the GPU no more often than fastai does', ('1 rank: waits per step',
                                                                   f'{ALL}: waits per step'),
          ('On a GPU the two numbers of the loss are summed over the ranks there',),
          tests=('test_a_step_waits_for_the_gpu_no_more_often_than_fastais',),
          real='NCCL'),
    Claim("one rank makes 0.99 of plain fastai's steps per second, and 0.97 of a hand-written script's",
          ('.*: steps per second over those of plain learn.fit',
           '.*: steps per second over those of a DDP script'),
          real='speed'),
    Claim('50 fits and a failure leave GPU memory flat', (r'\d+ fits and a failure: GPU memory flat to 1 MiB',),
          tests=('test_twenty_fits_leave_memory_flat',),
          real='memory of contexts and kernels'),
    Claim('a GPU that is full when the learner comes back: the learner stays on the CPU, with a warning', (),
          tests=('test_a_full_gpu_when_the_learner_comes_back',)),
    Claim('`%makedip -g all`: cells on all GPUs', (), tests=('test_cells_on_all_gpus',)),
    Claim('`distrib_bench` goes on behind a row that is out of memory', (),
          tests=('test_bench_with_a_row_that_has_no_memory',)),
    Claim('out of memory on one rank is an error that says so, and the next fit works',
          ('out of memory on one rank: RankRaised says so', 'out of memory on one rank: the next fit works'),
          tests=('test_a_fit_that_ends_early_leaves_no_memory_and_the_next_one_works',)),
    Claim('the stop button works within a step, and leaves no memory behind',
          ('interrupt within a step: KeyboardInterrupt', 'interrupt within a step: no memory left'),
          tests=('test_a_fit_that_ends_early_leaves_no_memory_and_the_next_one_works',),
          real='a kernel that runs'),
    Claim('a fit that fails leaves the last complete epoch',
          ('a fit that fails leaves the last complete epoch',),
          tests=('test_a_fit_that_goes_on_from_a_checkpoint',)),
    Claim('`in_torchddp` gives each process its GPU', (),
          tests=('test_a_function_has_a_gpu_in_each_process',)),
    Claim('GPUs of several machines', (),
          real='NCCL between machines'),
    Claim('background jobs on GPUs of their own', (),
          ('so is a job that shares a GPU with another job, the open block of another learner or a standing cluster',),
          tests=('test_two_jobs_on_different_gpus',)),
    Claim('the learner stays on its GPU while a job runs, and a line says what it keeps there',
          ('a job: the learner stays where it is', 'a job: a line says what the learner keeps'),
          ('The learner stays on its GPU while a job runs',),
          tests=('test_a_background_job',)),
    Claim("AMD's GPUs (`cuda` to torch) and Intel's (`xpu`, over `xccl`)", (),
          ("AMD's GPUs are `cuda` to torch",),
          real='other drivers'),
]

# Words about GPUs that promise nothing that could fail on one
NO_CLAIMS = ('Nothing has been run on a GPU yet', 'without a GPU on two CPU workers', 'You have one GPU.',
             "doesn't fit on one GPU", 'on simulated ones, and NCCL, speed and drivers not at all',
             'starts threads or uses the GPU when it is imported', '## Which GPUs',
             '`CUDA_VISIBLE_DEVICES=1,3 jupyter lab`', 'Sessions have one GPU',
             'what is promised about GPUs',
             'with one GPU or none, the fit runs in the notebook', 'more workers than GPUs, where there are GPUs')


def results(folder=RESULTS):
    "`{path of the page: what its JSON says}` of the runs on GPUs"
    found = {p: json.loads(p.read_text(encoding='utf-8')) for p in sorted(folder.glob('*.json'))}
    return {p.with_suffix('.md'): o for p, o in found.items() if not o['dry']}


def missing(claim, rows, dry=False):
    "Those of the claim's expressions for which `rows` has none that promises; in a dry run, none at all"
    promised = [o['what'] for o in rows if dry or o['ok'] is not None]
    return [o for o in claim.rows if not any(re.fullmatch(o, what) for what in promised)]


def state(claim, found):
    "`unproven`, or on which of the pages it held or broke, as Markdown"
    if not claim.rows: return 'unproven'
    said = []
    for page, rows in ((page, o['rows']) for page, o in found.items()):
        own = [o for o in rows if any(re.fullmatch(e, o['what']) for e in claim.rows)]
        link = f'[{page.stem}](../benchmarks/results/gpu/{page.name})'
        if any(o['ok'] is False for o in own): said.append(f'**broken** on {link}')
        elif not missing(claim, rows): said.append(f'holds on {link}')
    return ', '.join(said) or 'unproven'


def simulated(claim):
    "Whether tests hold the claim on simulated GPUs, and what only a real one can show"
    needs = f'needs a real one: {claim.real}' if claim.real else ''
    return '; '.join(filter(None, ['tested' if claim.tests else '', needs]))


def table(found):
    one, several = ({page: o for page, o in found.items() if (o['gpus'] > 1) == many} for many in (False, True))
    rows = [f'| {o.what} | {simulated(o)} | {state(o, one)} | {state(o, several)} |' for o in CLAIMS]
    return '\n'.join(['| | on simulated GPUs | on one GPU | on several |', '|---|---|---|---|', *rows])


def main():
    sys.path.insert(0, str(RESULTS.parent.parent))
    from render import between
    page = ROOT/'docs'/'gpus.md'
    text = between(page.read_text(encoding='utf-8'), table(results()), (BEGIN, END))
    page.write_text(text, encoding='utf-8')


if __name__ == '__main__': main()
