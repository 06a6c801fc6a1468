"""`%makedip -a fastai_v1`: learners made in `%%dip` cells train distributed; live bars in a real kernel."""
import asyncio, nbformat, pytest
from nbclient import NotebookClient
from pathlib import Path

CELLS = ["%load_ext fastddp\nfrom fastddp.all import *\nfrom fastai.basics import *",
"%makedip -n 2 -a fastai_v1",
'''%%dip
from fastai.basics import *
import fastddp.base.group
class Ds(torch.utils.data.Dataset):
    def __init__(self, n): self.x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], (self.x[i].sum() > 0).long()
data = DataBunch.create(Ds(50), Ds(13), bs=4, num_workers=0)
learn = Learner(data, nn.Linear(3, 2), loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
learn.fit_one_cycle(2, 1e-2)
steps, same = len(learn.recorder.losses), fastddp.base.group.all_gather_object(learn.model.weight.data)
print('steps', steps, 'same', torch.equal(*same), 'batch', learn.data.train_dl.batch_size)
learn.distrib_fit(1, 1e-3)
print('again', len(learn.recorder.losses))
print('valid', learn.validate(), 'preds', len(learn.get_preds()[0]))''',
"%dipull learn\nlearn.validate(); print('pulled', tuple(learn.model.weight.shape))",
"%makedip -k",
'''import time
from fastai.callback import Callback
class Slow(Callback):
    "Steps that a bar can be seen to follow: its updates are gathered, at most 20 a second leave a worker"
    def on_batch_end(self, **kwargs): time.sleep(.06)
learn.distrib_fit(4, 1e-2, nprocs=2, callbacks=[Slow()])''']


class Client(NotebookClient):
    "Keeps what the kernel says, in the order in which it says it"
    def process_message(self, msg, cell, cell_index):
        vars(self).setdefault('said', []).append((cell_index, msg['msg_type'], msg['content']))
        return super().process_message(msg, cell, cell_index)


said = []


@pytest.fixture(scope='module')
def outputs(tmp_path_factory):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in CELLS])
    nb.metadata.kernelspec = dict(name='python3', display_name='python3', language='python')
    client = Client(nb, timeout=120, resources=dict(metadata=dict(path=str(tmp_path_factory.mktemp('nb')))))
    client.execute()
    said[:] = client.said
    return [c.outputs for c in nb.cells]


def text(outs): return ''.join(o.get('text', '') for o in outs)


def test_learners_of_cells_train_distributed(outputs):
    assert 'steps 12 same True batch 4' in text(outputs[2]) and 'again 6' in text(outputs[2])
    assert 'preds 13' in text(outputs[2])
    assert 'pulled (2, 3)' in text(outputs[3])


def test_the_table_is_html_as_of_a_local_fit(outputs):
    html = ''.join(o.get('data', {}).get('text/html', '') for o in outputs[5])
    assert html.count('<tr') >= 3 and 'train_loss' in html and 'epochs in' in text(outputs[5])


def test_the_bar_is_live(outputs):
    "One bar, changed in place while the workers train"
    updates = [c for i, kind, c in said if i == 5 and kind == 'update_display_data']
    bars = {c['data']['text/html'] for c in updates if '<progress' in c['data'].get('text/html', '')}
    assert len(bars) >= 3 and len({c['transient']['display_id'] for c in updates}) <= 2
