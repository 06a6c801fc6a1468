"""Runs notebooks as `nbdev-test --n-workers 0` does, each in a fork of this process, which has imported torch, fastai
and nbdev.

    python tests/notebook_runner.py FLAGS       then one path a line on stdin; answers with one line of JSON each
"""
import atexit, gc, json, os, pathlib, signal, sys, tempfile, time, warnings

LIMIT = 280     # seconds for a notebook


def latest(displays):
    "What a reader sees in the end: an update is in the place of what it updates"
    return [*{o.transient.get('display_id', i): o for i, o in enumerate(displays)}.values()]


def keep_outputs(path):
    "The notebook as it ran, with its outputs, goes into build/executed, for the site"
    import nbdev.test
    from fastcore.nbio import write_nb
    target = pathlib.Path('build', 'executed', path).resolve()
    class Shell(nbdev.test.CaptureShell):
        def run_all(self, nb, *args, **kwargs):
            super().run_all(nb, *args, **kwargs)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_nb(nb, target)
        def _run_res(self, *args):
            res = super()._run_res(*args)
            res.display_objects = latest(res.display_objects)
            return res
    nbdev.test.CaptureShell = Shell


def run_here(path, flags):
    "In the fork: the notebook's cells from top to bottom; the exit code"
    from nbdev.test import nbdev_test
    if not os.path.isabs(path): keep_outputs(path)
    code = 0
    try: nbdev_test(path, flags=flags, n_workers=0, cell_timeout=200)
    except SystemExit as e: code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()     # helper processes and temporary folders go as they do at the end of any process
    return code


def wait_for(pid):
    "The fork's exit code; ends it, with all that it started, when its time is over"
    end = time.monotonic()+LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done: return os.waitstatus_to_exitcode(status)
        time.sleep(.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 'timed out'


def run(path, flags):
    "Runs one notebook in a fork: `(exit code, what it printed)`"
    with tempfile.TemporaryFile('w+') as out:
        sys.stdout.flush(), sys.stderr.flush()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.setpgid(0, 0)
                for fd, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out.fileno()), (2, out.fileno())):
                    os.dup2(to, fd)
                code = run_here(path, flags)
                sys.stdout.flush(), sys.stderr.flush()
            finally: os._exit(code)
        code = wait_for(pid)
        out.seek(0)
        return code, out.read()


def main(flags=''):
    warnings.simplefilter('ignore')
    answers = os.fdopen(os.dup(1), 'w')
    gc.disable()
    import nbdev.test, fastai.vision.all, fastai.tabular.all, fastai.text.all, fastai.collab, matplotlib.pyplot
    import matplotlib_inline.backend_inline, IPython.core.magics, execnb.shell
    warnings.resetwarnings()
    gc.collect()
    gc.freeze()     # else the first collection in each fork copies what all have in common: most of its time
    gc.enable()
    for line in iter(sys.stdin.readline, ''):
        code, text = run(line.rstrip('\n'), flags)
        print(json.dumps(dict(code=code, text=text)), file=answers, flush=True)


if __name__ == '__main__': main(*sys.argv[1:])
