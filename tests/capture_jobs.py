"""Jobs that show things, and a child process that runs them one after the other under `capture_output`: see
test_capture.py"""
import os, sys, time, traceback, warnings
import multiprocessing
from fastddp.output.capture import capture_output
from fastddp.output.replay import Replay, display_settings


def fit(n_epoch=3):
    from fastai.basics import DataLoaders, Learner, TfmdDL
    from fastai.callback.all import ShowGraphCallback
    import torch
    items = [(torch.tensor([float(i)]), torch.tensor([2.*i])) for i in range(32)]
    dls = DataLoaders(*[TfmdDL(items, bs=8) for _ in range(2)])
    learn = Learner(dls, torch.nn.Linear(1, 1), loss_func=torch.nn.functional.mse_loss, cbs=ShowGraphCallback())
    learn.fit(n_epoch, 1e-6)


def text():
    print('one')
    print('no newline', end='')
    print()
    print()
    print('two', file=sys.stderr)


def live():
    from IPython.display import display
    print('waiting')
    bar = display('0%', display_id=True)
    for i in range(100): bar.update(f'{i}%')
    bar.update('now')
    end = time.monotonic() + 120
    while not os.path.exists(os.environ['CAPTURE_SEEN']) and time.monotonic() < end: time.sleep(0.01)
    print('seen' if os.path.exists(os.environ['CAPTURE_SEEN']) else 'not seen')


def rich():
    from IPython.display import HTML, Markdown, display
    import pandas as pd
    display(pd.DataFrame(dict(colour=['red'])))
    print('between')
    display(Markdown('**bold**'), HTML('<i>it</i>'))


def figures():
    import matplotlib.pyplot as plt
    plt.plot([1, 2])
    plt.show()
    print('between')
    plt.plot([2, 1])


def bars():
    from tqdm.auto import tqdm
    for i in tqdm(range(20)): pass


def frames():
    from IPython.display import clear_output
    for i in range(50):
        clear_output(wait=True)
        print('frame', i)


def fails():
    print('before')
    try: 1/0
    except ZeroDivisionError: traceback.print_exc()


def loader():
    "Processes forked by the job print as well"
    import torch
    class Items:
        def __len__(self): return 4
        def __getitem__(self, i):
            print(f'item {i}')
            return i
    list(torch.utils.data.DataLoader(Items(), num_workers=2))


def quiet():
    print('not to be seen')
    fit(1)
    warnings.warn('to be seen')


def _main(conn):
    "The child: a job's name and `DisplaySettings` come in, events and 'done' go out"
    # A DataLoader forks processes here, as in a worker
    multiprocessing.process.current_process()._config['daemon'] = False
    multiprocessing.set_start_method('fork', force=True)
    while (order := conn.recv()) is not None:
        name, settings = order
        with capture_output(conn.send, settings): globals()[name]()
        conn.send('done')


class Child:
    "One process, in which `run` runs jobs"
    def __init__(self, method):
        ctx = multiprocessing.get_context(method)
        if method == 'forkserver': ctx.set_forkserver_preload(['fastai.callback.all', 'matplotlib.pyplot'])
        self.conn, theirs = ctx.Pipe()
        self.proc = ctx.Process(target=_main, args=(theirs,), daemon=True)
        self.proc.start()
        theirs.close()

    def run(self, name, rank=0, see=(0,), **kwargs):
        "Run job `name` as `rank`, and replay what it shows"
        seen = kwargs.get('frontend') != 'silent'
        self.conn.send((name, display_settings()._replace(send_text=seen, **kwargs)))
        replay = Replay(see=see, live=True)
        while True:
            replay.flush()
            if not self.conn.poll(0.05): continue
            if (event := self.conn.recv()) == 'done': return replay.close()
            replay.add(rank, event)

    def close(self):
        self.conn.send(None)
        self.proc.join(120)
        assert self.proc.exitcode == 0
