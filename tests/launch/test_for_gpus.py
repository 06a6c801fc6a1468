"""What is done for GPUs and can be tested without one."""
import os
import pytest, torch, torch.distributed as dist
from fastai.callback.core import Callback
from torch import nn
from fastddp.all import in_torchddp
from fastddp.base import device, failure, group
from fastddp.base.scoped import with_attrs
from fastddp.process.worker import Surroundings
from fastddp.shard.gradients import graph_of
from parity import learner


def test_the_environment_is_written_only_where_it_differs(monkeypatch):
    "C can't write it while a thread of NCCL reads it"
    written = []
    class Noting(dict):
        def __setitem__(self, k, v):
            written.append(k)
            super().__setitem__(k, v)
        def __delitem__(self, k):
            written.append(k)
            super().__delitem__(k)
    now = Surroundings.now(NEW='1', CHANGED='2')
    monkeypatch.setattr(os, 'environ', Noting(os.environ, CHANGED='1', GONE='1'))
    now.enter()
    assert sorted(written) == ['CHANGED', 'GONE', 'NEW'] and os.environ == now.env


@pytest.mark.parametrize('words', [
    'NCCL error in: ..., remote process exited or there was a network error, NCCL version 2.27\nncclRemoteError: ...',
    'Last error:\nsocketProgress: Connection closed by remote peer 127.0.0.1<41234>',
    'Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?'])
def test_nccls_words_for_the_death_of_a_peer_are_an_echo(words):
    try: raise torch.distributed.DistBackendError(words)
    except torch.distributed.DistBackendError as e: noted = failure.failure_of(e, 1)
    assert failure.is_echo(noted)


class Parts(Callback):
    "Into how many parts torch.compile has cut the backward pass"
    run_valid = False
    def after_loss(self):
        nodes = [node.name() for node in graph_of(self.learn.loss_grad)]
        self.n = sum('CompiledFunction' in o for o in nodes)


@pytest.mark.full
def test_the_backward_pass_of_a_compiled_model_is_cut_at_ddps_buckets():
    "so that gradients are averaged while the pass runs"
    layers = [nn.Sequential(nn.Linear(600, 600), nn.ReLU()) for _ in range(3)]
    model = torch.compile(nn.Sequential(nn.Linear(4, 600), *layers, nn.Linear(600, 3)), backend='aot_eager')
    learn = learner(train=8, model=model, cbs=Parts())
    learn.distrib_fit(1, nprocs=2, bucket_cap_mb=1)
    assert learn.parts.n > 2


def groups_beside():
    """Of each rank: whether it is in a group of rank 1 beside that of all, how often torch had it split NCCL's
    communicator for that, and the sum over a group that all make afterwards"""
    calls = []
    class Split:
        "In the place of NCCL's group, on ranks that are no members"
        def perform_nocolor_split(self, device): calls.append(device)
    with with_attrs(dist.distributed_c10d, _get_split_source=lambda pg: None if group.rank() else Split()):
        dist.group.WORLD.bound_device_id = torch.device('cuda', 0)      # as `join` leaves it on a GPU
        members = group.subgroup([1])
        dist.group.WORLD.bound_device_id = None
    if not group.rank():
        with group.group_of_one(): pass
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group([0, 1]))
    return group.all_gather_object([float(members is not None), float(len(calls)), float(ones)])


def test_ranks_that_are_not_in_a_group_make_no_call_of_nccl_for_it():
    assert in_torchddp(2, groups_beside) == [[0., 0., 2.], [1., 0., 2.]]
