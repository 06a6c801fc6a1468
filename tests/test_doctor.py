"""The doctor's page, and GPUs that can't exchange data, made up with workers on the CPU."""
import os, subprocess, sys
import fastddp, pytest
from fastddp.base import device
from fastddp.launch import local
from fastddp.launch.engine import Job
from fastddp.launch.local import all_reduce_seconds


def test_the_page(capsys, monkeypatch):
    "It measures the exchange, and is the same as a function and as a module"
    monkeypatch.setenv('NCCL_DEBUG', 'WARN')
    traps = fastddp.doctor()
    out = capsys.readouterr().out
    assert ' available)' in out and 'locked memory ' in out
    assert 'all-reduce: 1 MB ' in out and 'torch ' in out and 'NCCL_DEBUG=WARN' in out
    assert all(f'! {o}: ' in out for o in traps) and fastddp.doctor.doctor is not fastddp.doctor


@pytest.mark.full
def test_the_command():
    r = subprocess.run([sys.executable, '-m', 'fastddp.doctor'], capture_output=True, text=True, timeout=120)
    assert r.returncode == ('No known trap.' not in r.stdout), r.stderr
    assert 'all-reduce: ' in r.stdout


def env_of_worker(ctx, _): return os.environ.get('NCCL_P2P_DISABLE')


def fails(ctx, sizes): raise RuntimeError('CUDA error: peer access is not supported')


@pytest.mark.parametrize('probe', [all_reduce_seconds, fails])
def test_gpus_that_cannot_exchange_do_without_p2p(probe, capsys, monkeypatch):
    monkeypatch.setattr(local, '_env', {})
    monkeypatch.setattr(local, '_proven', set())
    monkeypatch.setattr(local, 'all_reduce_seconds', probe)
    monkeypatch.setattr(local.Local, 'is_unproven', lambda self, n: not local._proven)
    monkeypatch.delenv('NCCL_P2P_DISABLE', raising=False)
    with local.Local(gpus=[], timeout=77) as launcher:
        results = launcher.run(Job.of(env_of_worker, None), 2).results
        assert launcher.timeout == 77
    broken, out = probe is fails, capsys.readouterr().out
    assert results == ['1' if broken else None]*2 and ('NCCL_P2P_DISABLE=1' in out) == broken
    assert 'NCCL_P2P_DISABLE' not in os.environ


def interrupted(*args): raise KeyboardInterrupt


def test_an_interrupted_probe_proves_nothing(monkeypatch):
    "GPUs that hang are tried again in the next call"
    monkeypatch.setattr(local, '_proven', set())
    monkeypatch.setattr(local.Local, '_run_once', interrupted)
    launcher = local.Local(gpus=[0, 1])
    monkeypatch.delenv('NCCL_P2P_DISABLE', raising=False)
    with pytest.raises(KeyboardInterrupt): launcher.prove(2, None)
    assert launcher.is_unproven(2)


def test_a_bound_process_counts_the_cores_of_the_machine(monkeypatch):
    "Near a GPU it has those of one NUMA node, made up here: loader processes of all ranks share the machine's"
    was, binding = os.sched_getaffinity(0), pytest.importorskip('torch.numa.binding')
    for k in '_bound', '_unbound': monkeypatch.setattr(device, k, None)
    monkeypatch.setattr(device, 'binds_to_numa', lambda: True)
    def bind(**kwargs): os.sched_setaffinity(0, {min(was)})
    monkeypatch.setattr(binding, '_maybe_apply_numa_binding_to_current_process', bind)
    try:
        device.bind_near(0)
        assert len(os.sched_getaffinity(0)) == 1 and device.visible_cores() == len(was)
    finally: os.sched_setaffinity(0, was)
