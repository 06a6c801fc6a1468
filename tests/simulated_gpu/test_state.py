"""What code of the notebook keeps on a GPU is on that GPU after a fit on workers, as after a local one."""
import pytest
from simulated_gpu import on_gpus
from simulated_gpu.learners import *
from spread import long_but


class Ema(Callback):
    "A dict of tensors"
    order = 70
    def before_fit(self):
        if not hasattr(self, 'shadow'):
            self.shadow = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
    def after_batch(self):
        if self.training:
            for k, v in self.model.state_dict().items(): self.shadow[k].mul_(.9).add_(v, alpha=.1)
    def tensors(self): return self.shadow.values()


class EmaModel(Callback):
    "A module"
    order = 70
    def before_fit(self):
        if not hasattr(self, 'ema'): self.ema = deepcopy(self.learn.model)
    def after_batch(self):
        if not self.training: return
        with torch.no_grad():
            for a, b in zip(self.ema.parameters(), self.model.parameters()): a.lerp_(b, .1)
    def tensors(self): return self.ema.parameters()


class Counts(Callback):
    "A tensor"
    def before_fit(self): self.n = getattr(self, 'n', torch.zeros(5, device=self.dls.device))
    def after_batch(self): self.n += torch.bincount(self.y, minlength=5)
    def tensors(self): return [self.n]


class Losses(Callback):
    "A list of tensors"
    def __init__(self): self.all = []
    def after_batch(self):
        if self.training: self.all.append(self.loss.detach())
    def after_fit(self): self.mean = torch.stack(self.all).mean()
    def tensors(self): return [*self.all, self.mean]


@pytest.mark.few(1)
@pytest.mark.parametrize('kind', long_but([Ema, EmaModel, Counts, Losses], Ema, Losses))
@on_gpus()
def test_what_a_callback_keeps(kind):
    for home in gpu(0), gpu(1):
        cb = kind()
        learn = learner(device=home, cbs=cb)
        for fit in learn.distrib_fit, learn.distrib_fit, learn.fit:
            fit(1)
            assert {t.device for t in cb.tensors()} == {home}, (fit, home)


def fits(cb, learn, n=2, **options):
    "Fits on workers, with what the callback keeps after each; then one in this process"
    for i in range(n):
        learn.distrib_fit(1, **options)
        assert {t.device for t in cb.tensors()} == {learn.dls.device}, i
    learn.fit(1)


@pytest.mark.full
@pytest.mark.parametrize('kind', long_but([Ema, EmaModel, Counts, Losses], Ema))
@on_gpus()
def test_it_goes_through_workers_on_the_cpu(kind):
    "They have no GPU, and still it comes back to the one that it was on. What they make is on theirs, the CPU"
    cb = kind()
    learn = learner(cbs=cb)
    learn.fit(1)
    learn.distrib_fit(1, gpus=[], nprocs=2)
    learn.distrib_fit(1, gpus=[], nprocs=2)
    if kind is not Losses: learn.fit(1)


@pytest.mark.parametrize('kind', long_but([Ema, EmaModel, Counts, Losses], Ema))
@on_gpus()
def test_a_learner_on_the_cpu(kind): fits(*with_cb(kind, torch.device('cpu')))


def with_cb(kind, device=None):
    cb = kind()
    return cb, learner(device=device, cbs=cb)


@pytest.mark.parametrize('kind', long_but([Ema, EmaModel, Counts, Losses], EmaModel))
@on_gpus()
def test_a_background_job(kind):
    cb, learn = with_cb(kind, gpu(1))
    for _ in range(2):
        learn.distrib_fit(1, wait=False).result()
        assert {t.device for t in cb.tensors()} == places(learn) == {gpu(1)}
    job = learn.distrib_fit(1, wait=False)
    job.exception()     # waits for the end
    job.pull()
    assert {t.device for t in cb.tensors()} == places(learn) == {gpu(1)}
    job.result()
    learn.fit(1)


@pytest.mark.full
@on_gpus()
def test_a_tensor_on_another_gpu_than_the_learner():
    "It goes back there; what is made of it in the fit belongs to the learner's GPU"
    class Holder(Callback):
        def before_fit(self): self.made = self.held[0]+1
    cb = Holder()
    cb.held, cb.tuple = [torch.ones(2, device=gpu(2))], (torch.ones(3, device=gpu(1)), torch.ones(3))
    learn = learner(cbs=cb)
    learn.distrib_fit(1)
    assert (cb.held[0].device, cb.made.device) == (gpu(2), gpu(0))
    assert [t.device for t in cb.tuple] == [gpu(1), torch.device('cpu')]


@on_gpus()
def test_variables_of_cells():
    namespace = dict(Callback=Callback, __name__='__main__')
    exec('seen, last = [], {}\n'
         'class Globals(Callback):\n'
         '    def after_batch(self):\n'
         '        if self.training:\n'
         '            seen.append(self.loss.detach())\n'
         '            last["x"] = self.x.mean()\n', namespace)
    learn = learner(device=gpu(1), cbs=namespace['Globals']())
    for fit in learn.distrib_fit, learn.distrib_fit, learn.fit:
        fit(1)
        assert {t.device for t in [*namespace['seen'], *namespace['last'].values()]} == {gpu(1)}


@on_gpus()
def test_data_transforms_and_losses_with_tensors_on_the_gpu():
    class Scale(Transform):
        "It keeps a tensor, which it changes, and makes another one"
        def __init__(self): self.by, self.n = torch.ones(1, device=gpu(1)), None
        def encodes(self, x: torch.Tensor):
            if x.dim() < 4: return x
            self.n = torch.ones(1, device=x.device) if self.n is None else self.n+1
            self.by += .01
            return x*self.by
    class Weighed(nn.Module):
        "Parameters, buffers and a plain tensor"
        def __init__(self):
            super().__init__()
            self.w, self.plain = nn.Parameter(torch.ones(5)), torch.ones(5, device=gpu(1))
            self.register_buffer('n', torch.zeros(1))
        def forward(self, p, y):
            self.n += 1
            return F.cross_entropy(p*self.w*self.plain, y)
    xs, ys = (t.to(gpu(1)) for t in pictures())
    items, tfm, loss = list(zip(xs, ys)), Scale(), Weighed().to(gpu(1))
    dls = DataLoaders.from_dsets(items[:40], items[40:], bs=6, device=gpu(1), num_workers=0)
    for dl in dls.loaders: dl.after_batch.add(tfm)
    learn = Learner(dls, convnet().to(gpu(1)), loss_func=loss, metrics=accuracy)
    with learn.no_bar(), learn.no_logging():
        for fit in learn.distrib_fit, learn.distrib_fit, learn.fit:
            fit(1)
            kept = [tfm.by, tfm.n, loss.w, loss.n, loss.plain, *dls.train.dataset[0]]
            assert [t.device for t in kept] == [gpu(1)]*len(kept), fit
            assert places(learn) == {gpu(1)}


@pytest.mark.full
@on_gpus()
def test_a_fit_that_goes_on_from_a_checkpoint(tmp_path):
    "In the same kernel, after a failure; and from the file"
    class Fails(Callback):
        run_valid = False
        def before_batch(self):
            if self.epoch == 1 and self.iter == 1 and not getattr(self, 'may', False): raise RuntimeError('on purpose')
    for from_file in False, True:
        cb, fails = Ema(), Fails()
        learn = learner(device=gpu(1), cbs=[cb, fails])
        learn.path = tmp_path
        with pytest.raises(RankRaised): learn.distrib_fit(3, checkpoint='epoch' if from_file else None)
        assert {t.device for t in cb.tensors()} == places(learn) == {gpu(1)}
        fails.may = True
        learn.distrib_resume(*(['distrib'] if from_file else []))
        assert {t.device for t in cb.tensors()} == places(learn) == {gpu(1)} and learn.epoch == 2
        learn.fit(1)


class Keeps(Callback):
    "The weights of rank 0 at the end of the fit"
    order = 10_000
    def after_fit(self): self.at_end = [t.detach().cpu().clone() for t in self.model.state_dict().values()]


@pytest.mark.parametrize('n_classes', long_but([1, 2, 3, 4], 2))
@on_gpus()
def test_all_that_trains_comes_back(n_classes):
    "Bit by bit: the 32-bit sum of a bias of two classes is the same after one fit in ten"
    from fastai.optimizer import Adam
    for i in range(6):
        torch.manual_seed(i)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, n_classes))
        loss = lambda p, y: ((p-(y % n_classes)[:, None].float())**2).mean()
        learn = learner(model=model, loss=loss, opt_func=Adam, lr=.01*(i+1), cbs=Keeps(), n_train=12, metrics=None)
        learn.distrib_fit(1)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(learn.keeps.at_end, model.state_dict().values())), i


class Banks(Callback):
    "Tensors of all kinds on the GPU, in a list longer than any limit was; one is changed"
    def before_fit(self):
        if hasattr(self, 'bank'): return
        self.bank = [torch.zeros(2, device=self.dls.device) for _ in range(150)]
        self.kinds = [torch.zeros(2, dtype=d, device=self.dls.device) for d in (
            torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool)]
    def after_epoch(self):
        self.bank[140] += 1
        for t in self.kinds: t.fill_(1)


@on_gpus()
def test_banks_on_a_gpu():
    learn = learner(cbs=Banks(), n_train=12)
    for n in 1, 2:
        learn.distrib_fit(1)
        assert learn.banks.bank[140].tolist() == [n, n] and not learn.banks.bank[0].any()
        assert all(t.all() for t in learn.banks.kinds)


class Items:
    "A data set over tensors on the GPU"
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i].cpu(), torch.tensor(i % 5)


class Writes(Callback):
    def after_epoch(self): self.dls.train_ds.items[3].add_(1)


@on_gpus()
def test_items_on_a_gpu():
    learn = learner(cbs=Writes(), n_train=12)
    items = [torch.zeros(1, 6, 6, device=gpu()) for _ in range(12)]
    learn.dls = DataLoaders.from_dsets(Items(items), Items(items[:2]), bs=3, device=gpu(), num_workers=0)
    learn.distrib_fit(1)
    assert learn.dls.train_ds.items[3].mean() == 1 and learn.dls.train_ds.items[3].device == gpu()
