"""The doctor's page, and GPUs that can't exchange data, made up with workers on the CPU."""
import contextlib, os, subprocess, sys, threading, time
import fastddp, pytest
from fastddp.all import doctor
from fastddp.base import device
from fastddp.base.errors import RankDied, RankRaised
from fastddp.launch import local
from fastddp.launch.engine import Job
from fastddp.launch.local import exchanges_right


def test_the_page(capsys, monkeypatch):
    "It measures the exchange, and is the same as a function and as a module"
    monkeypatch.setenv('NCCL_DEBUG', 'WARN')
    assert fastddp.doctor() is None     # a cell shows the page, and nothing after it
    out = capsys.readouterr().out
    assert ' free of ' in out and 'between workers  gradients of 1 MB ' in out
    assert 'torch ' in out and out.count('NCCL_DEBUG') == out.count('WARN') == 1
    module = sys.modules['fastddp.doctor']
    assert all(f'! {name}: ' in out for name, _ in module.traps(module.facts()))
    assert doctor is module.doctor is not fastddp.doctor


@pytest.mark.full
def test_the_command():
    r = subprocess.run([sys.executable, '-m', 'fastddp.doctor'], capture_output=True, text=True, timeout=120)
    assert r.returncode == ('No known trap.' not in r.stdout), r.stderr
    assert 'between workers ' in r.stdout


def env_of_worker(ctx, _): return os.environ.get('NCCL_P2P_DISABLE')


def fails(ctx, n):
    if os.environ.get('NCCL_P2P_DISABLE') != '1': raise RuntimeError('CUDA error: peer access is not supported')
    return True


def fails_anyway(ctx, n): raise RuntimeError('NCCL error: no memory')


def is_wrong(ctx, n): return os.environ.get('NCCL_P2P_DISABLE') == '1' or ctx.rank == 0


def starts_slowly(ctx, n):
    "GPUs that take longer to start than the exchange may take"
    emit = ctx.emit
    def and_waits(event):
        emit(event)
        time.sleep(.5)
    if env_of_worker(ctx, n) is None: time.sleep(3)
    ctx.emit = and_waits
    return exchanges_right(ctx, n)


def is_full(ctx, n): raise RuntimeError('CUDA out of memory')
def nccl_is_full(ctx, n): raise RuntimeError('NCCL error: Failed to CUDA calloc async 608 bytes')


def unchecked(monkeypatch, probe):
    "Workers on the CPU are taken for GPUs whose exchange is untried; `probe` tries it"
    monkeypatch.setattr(local, 'extra_env', {})
    monkeypatch.setattr(local, '_p2p_checked', set())
    monkeypatch.setattr(local, 'exchanges_right', probe)
    monkeypatch.setattr(local.Local, 'needs_p2p_check', lambda self, n: not local._p2p_checked)
    monkeypatch.delenv('NCCL_P2P_DISABLE', raising=False)


@pytest.mark.parametrize('probe', [exchanges_right, fails, is_wrong, fails_anyway])
def test_gpus_that_cannot_exchange_do_without_p2p(probe, capsys, monkeypatch):
    unchecked(monkeypatch, probe)
    with local.Local(gpus=[], timeout=77) as launcher:
        results = launcher.run(Job.of(env_of_worker, None), 2).results
        assert launcher.timeout == 77
    broken, out = probe in (fails, is_wrong), capsys.readouterr().out
    assert results == ['1' if broken else None]*2 and ('NCCL_P2P_DISABLE=1' in out) == broken
    assert 'NCCL_P2P_DISABLE' not in os.environ
    assert bool(local._p2p_checked) == (probe is not fails_anyway)     # nothing was exchanged


def test_the_page_says_what_to_do_without_p2p(capsys, monkeypatch):
    "Also once a fit has found out, and printed its line"
    unchecked(monkeypatch, is_wrong)
    for _ in range(2):
        doctor()
        out = capsys.readouterr().out
        assert '! no P2P: ' in out and 'update a driver' in out and 'gradients of 1 MB ' in out


def test_gpus_that_start_slowly_keep_p2p(monkeypatch):
    unchecked(monkeypatch, starts_slowly)
    monkeypatch.setattr(local, '_P2P_TIMEOUT', 2.5)
    with local.Local(gpus=[]) as launcher: launcher.run(Job.of(env_of_worker, None), 2)
    assert not local.extra_env and local._p2p_checked


@pytest.mark.parametrize('error', [RankRaised, RankDied, KeyboardInterrupt])
def test_gpus_whose_check_ends_otherwise_are_checked_again(error, monkeypatch):
    "A full GPU, a killed worker and Ctrl-C say nothing of the exchange"
    unchecked(monkeypatch, nccl_is_full if error is RankRaised else is_full)
    if error is not RankRaised:
        def ends(*_): raise RankDied(0, -9) if error is RankDied else KeyboardInterrupt
        monkeypatch.setattr(local.Local, '_run_once', ends)
    with pytest.raises(error): local.Local(gpus=[]).run(Job.of(env_of_worker, None), 2)
    assert not local.extra_env and not local._p2p_checked


def test_gpus_that_exchange_over_the_cpu_are_not_checked(monkeypatch):
    monkeypatch.delenv('NCCL_P2P_DISABLE', raising=False)
    assert local.Local(gpus=[7, 8]).needs_p2p_check(2)
    assert not local.Local(gpus=[7, 8], backend='gloo').needs_p2p_check(2)
