"Which memory has changed: what a payload mapped, and what lies at the same addresses later"
import gc, mmap
import numpy as np, pytest, torch
from fastddp.payload import buffers
from fastddp.payload.buffers import Block, original_of
from fastddp.payload.changes import dump_changes, read_bytes
from fastddp.payload.kinds import memory_mark
from fastddp.payload.notes import Notes
from fastddp.payload.pickling import Payload
from fastddp.payload.places import Places

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
