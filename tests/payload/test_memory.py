"Which memory has changed: what a payload mapped, and what lies at the same addresses later"
import contextlib, gc, mmap
import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastddp.all import InProcess
from fastddp.payload import buffers
from fastddp.payload.buffers import Block, original_of
from fastddp.payload.changes import dump_changes, read_bytes
from fastddp.payload.kinds import memory_mark
from fastddp.payload.notes import Notes
from fastddp.payload.pickling import Payload
from fastddp.payload.places import Places
from parity import learner

SIZE = 3*mmap.PAGESIZE


@pytest.fixture(autouse=True)
def forgotten(leaves_nothing):
    yield
    buffers._originals.clear()
    gc.collect()        # objects that refer to each other hold a mapping


def mapped(block, value):
    "Memory with bytes of this value, as a worker maps that of a job"
    payload = Payload(b'', [memoryview(bytes([value])*SIZE)])
    return np.frombuffer(block.read(block.write(payload), notes_original=True)[0], np.uint8)


def address(a): return a.__array_interface__['data'][0]


def sent(notes):
    return [i for b in read_bytes(dump_changes(notes).meta) for i, *_ in b.tensors]


def test_other_memory_at_the_address_of_a_mapping_that_is_gone():
    "Weights there were lost: before and after training they differed from what had been mapped"
    block = Block()
    a = mapped(block, 1)
    was = address(a)
    assert original_of(was, SIZE)
    del a
    kept = []
    while True:     # the system gives the same addresses again
        kept.append(np.frombuffer(mmap.mmap(-1, SIZE), np.uint8))
        if address(kept[-1]) == was or len(kept) == 100: break
    assert original_of(was, SIZE) is None
    t = torch.from_numpy(kept[-1])
    notes = Notes(Places([t]).walk())
    t += 1
    assert len(sent(notes)) == 1
    block.close()


def test_memory_that_was_written_before_it_was_noted():
    "It differs from the notebook's, which is what counts"
    block = Block()
    t = torch.from_numpy(mapped(block, 1))
    assert memory_mark(t.data_ptr(), SIZE, True) == "as sent"
    t += 1
    notes = Notes(Places([t]).walk())
    assert len(sent(notes)) == 1
    t += 1
    assert len(sent(notes)) == 1
    assert len(sent(notes)) == 1    # what was sent once is sent again
    block.close()


class Reads:
    "A data set over an array"
    def __init__(self, rows): self.rows = rows
    def __len__(self): return 32
    def __getitem__(self, i): return torch.tensor(self.rows[i*1000, :4]), torch.tensor(i % 3)


@pytest.mark.parametrize('mode', ['r', 'r+'])
def test_an_array_in_a_file_may_be_larger_than_the_memory(mode, tmp_path):
    with open(tmp_path/'rows', 'wb') as f: f.truncate(200*2**30)
    rows = np.memmap(tmp_path/'rows', np.float32, mode, shape=(10_000_000, 5000))
    learn = learner()
    learn.dls = DataLoaders(*(DataLoader(Reads(rows), bs=4) for _ in range(2)))
    learn.distrib_fit(1, nprocs=2)
    assert learn.dls.train_ds.rows is rows and len(learn.recorder.losses) == 4


class Writes(Callback):
    "Writes to an array in a file, by a view and by a tensor of it"
    def __init__(self, rows):
        self.rows, self.part, self.tensor, self.read = rows, rows[10:20], torch.from_numpy(rows), []
    def after_epoch(self):
        self.rows[0] += 1
        self.part[1] += 2
        self.tensor[11] *= 3
        self.read += [float(self.rows[11]), float(self.part[1]), float(self.tensor[0])]


@pytest.mark.parametrize('mode', ['r+', 'c'])
@pytest.mark.parametrize('n', [100, 9000])
def test_what_a_callback_writes_into_an_array_in_a_file(n, mode, tmp_path):
    "It is in the file afterwards if a fit in one process would write it there, and once"
    def fit(name, **options):
        np.arange(n, dtype=np.float32).tofile(tmp_path/name)
        learn = learner(cbs=Writes(np.memmap(tmp_path/name, np.float32, mode)))
        with learn.distrib_ctx(**options) if options else contextlib.nullcontext():
            learn.fit(2)
            learn.fit(1)
        cb = learn.writes
        assert type(cb.rows) is np.memmap and np.shares_memory(cb.rows, cb.part)
        return cb.read, cb.rows.tolist(), np.fromfile(tmp_path/name, np.float32).tolist()
    one = fit('one')
    assert fit('two', nprocs=2) == fit('here', launcher=InProcess()) == one
    assert (one[2][0] == 3) is (mode == 'r+')
