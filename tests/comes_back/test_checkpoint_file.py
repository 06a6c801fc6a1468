"""The file of a checkpoint: damaged, it is never another state; its weights are read without a pickle."""
import os, pickle, random, stat
import pytest, torch
from fastai.optimizer import Adam
from fastddp.all import CantDistribute, InProcess
from fastddp.fastai2.resume import checkpoint_path, read_checkpoint, structure_of, write_checkpoint
from fastddp.payload.pieces import PieceFile
from parity import learner, mlp

DAMAGES = {
    'a bit': lambda b, r: b.__setitem__(i := r.randrange(len(b)), b[i] ^ 1 << r.randrange(8)),
    'a bit of the header': lambda b, r: b.__setitem__(i := r.randrange(2000), b[i] ^ 1 << r.randrange(8)),
    'its end is missing': lambda b, r: b.__delitem__(slice(r.randrange(len(b)), None)),
    'its end is zeros': lambda b, r: b.__setitem__(slice(i := r.randrange(len(b)), None), bytes(len(b)-i)),
    'two parts are swapped': lambda b, r: _swap(b, *sorted(r.sample(range(0, len(b)-64, 64), 2))),
    'something is behind it': lambda b, r: b.extend(bytes(r.randrange(1, 100)))}


def _swap(b, i, j): b[i:i+64], b[j:j+64] = b[j:j+64], b[i:i+64]


def make(path, **kwargs): return learner(path=path, **dict(opt_func=Adam) | kwargs)
def weights(learn): return [p.tolist() for p in learn.model.parameters()]


@pytest.fixture
def trained(tmp_path):
    "A learner that has written two checkpoints, of two epochs"
    learn = make(tmp_path)
    learn.distrib_fit(2, 1e-2, checkpoint='epoch', launcher=InProcess(), nprocs=1)
    return learn


def test_damage_is_found(trained):
    "The file before it, or one sentence; damage in what zipfile doesn't read changes nothing"
    path, rnd = checkpoint_path(trained), random.Random(0)
    whole, before = path.read_bytes(), path.with_name(path.name+'.1')
    good, older = read_checkpoint(path, trained), before.read_bytes()
    path.write_bytes(older)
    expected = read_checkpoint(path, trained)
    assert expected != good
    n_found = 0
    for i in range(300):
        damaged = bytearray(whole)
        [*DAMAGES.values()][i%len(DAMAGES)](damaged, rnd)
        path.write_bytes(damaged)
        before.write_bytes(older)
        found = read_checkpoint(path, trained)
        assert found == expected or found == good
        before.unlink()
        if found == good: continue
        n_found += 1
        with pytest.raises(CantDistribute, match=r"The checkpoint can't be read\. .*distrib\.ckpt: "):
            read_checkpoint(path, trained)
    assert n_found > 200        # not what is behind the file, 50 times


def run_of(path):
    with PieceFile(path) as f: return f.header['run']


def test_what_takes_the_place_of_a_file_is_on_the_disk(trained, monkeypatch):
    "And of its owner only; a file that was prepared under a name that can be guessed is not followed"
    path, done = checkpoint_path(trained), []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (victim := path.parent/'victim').write_text('mine')
    for name in 'distrib.ckpt.tmp', 'distrib.ckpt.0.tmp': (path.parent/name).symlink_to(victim)
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: (done.append(os.readlink(f'/proc/self/fd/{fd}')), sync(fd)))
    monkeypatch.setattr(os, 'replace', lambda a, b: (done.append((str(a), str(b))), replace(a, b)))
    write_checkpoint(path, structure_of(trained), run_of(path), [])
    monkeypatch.undo()
    tmp, *_, last = done
    assert done == [tmp, (str(path), f'{path}.1'), (tmp, str(path)), last] and last == str(path.parent)
    assert victim.read_text() == 'mine'
    assert {o.name for o in path.parent.iterdir()} == {'distrib.ckpt', 'distrib.ckpt.1', 'distrib.ckpt.tmp', 'victim'}


def test_a_write_that_fails_leaves_nothing(trained, monkeypatch):
    path = checkpoint_path(trained)
    whole = path.read_bytes()
    def full(fd): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError): write_checkpoint(path, structure_of(trained), run_of(path), [])
    assert path.read_bytes() == whole and len([*path.parent.iterdir()]) == 2


class Evil:
    "A pickle that makes a folder when it is loaded"
    def __init__(self, path): self.path = str(path)
    def __reduce__(self): return os.mkdir, (self.path,)


def test_weights_alone_are_read_without_a_pickle(trained, tmp_path):
    path, done = checkpoint_path(trained), tmp_path/'done'
    new = make(tmp_path, opt_func=None)     # as for inference: it needn't have the fit's optimizer
    assert new.distrib_load() is new and weights(new) == weights(trained) and new.opt is None
    with pytest.raises(CantDistribute, match='is of another learner: its weights differ'):
        make(tmp_path, model=mlp(n_hid=9)).distrib_load()
    # whose checksums are right
    assert len(read_checkpoint(path, trained)) == 3     # the call, the graph, what an epoch has changed
    evil, tensors = pickle.dumps(Evil(done)), dict(trained.model.named_parameters())
    buffers = [bytearray(t.detach().numpy().tobytes()) for t in tensors.values()]
    views = {k: torch.frombuffer(b, dtype=t.dtype).view(t.shape) for (k, t), b in zip(tensors.items(), buffers)}
    write_checkpoint(path, structure_of(trained), run_of(path), [(evil, []), (evil, buffers), (evil, [])], views)
    new = make(tmp_path)
    assert weights(new) != weights(trained)
    new.distrib_load()
    assert weights(new) == weights(trained) and not done.exists()
    with pytest.raises(Exception): new.distrib_resume('distrib')
    assert done.exists()        # it would have been seen
