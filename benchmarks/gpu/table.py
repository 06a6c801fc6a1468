"""What was checked, as rows; as JSON for programs and a page for people"""
import contextlib, json, platform, time, traceback
import torch
from . import machine


class Table:
    "Rows `(section, what, ok, detail)`: `ok` is None for a figure that promises nothing"
    def __init__(self): self.rows, self.section, self.where = [], '', ''
    def add(self, what, ok, detail=''):
        "Adds a row and prints it"
        ok = None if ok is None else bool(ok)
        self.rows.append(dict(section=self.section, what=what, ok=ok, detail=detail, where=self.where))
        print(f"{ {True: 'PASS', False: 'FAIL', None: '    '}[ok]}  {what}  {detail}", flush=True)
    def about(self, what, value): self.add(what, None, value)

    @contextlib.contextmanager
    def of(self, section):
        "The rows added inside belong to `section`; what is raised there is a row, and the other sections go on"
        self.section = section
        # the backend of two ranks, in sections whose rows don't name it
        self.where = machine.two_are() if section in ('precision', 'memory', 'stop') else ''
        print(f'== {section}', flush=True)
        start = time.perf_counter()
        try: yield self
        except Exception as e:
            self.add(f'{section} ran to its end', False, f'{type(e).__name__}: {str(e)[:2000]}')
            traceback.print_exc()
        self.about('seconds for this section', round(time.perf_counter()-start, 1))
    @property
    def broken(self): return [o for o in self.rows if o['ok'] is False]

    def save(self, path):
        "Writes `path`.json and `path`.md"
        about = dict(machine=machine.name(), gpus=machine.n_gpus(), dry=machine.DRY or machine.SIMULATED,
                     torch=torch.__version__, python=platform.python_version(), date=time.strftime('%Y-%m-%d'))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix('.json').write_text(json.dumps(dict(**about, rows=self.rows), indent=1)+'\n')
        path.with_suffix('.md').write_text(self.page(about))

    def page(self, about):
        "A page of tables, one for each section"
        lines = [f"# {about['gpus']} x {about['machine']}", '',
                 f"torch {about['torch']}, Python {about['python']}, {about['date']}."]
        if about['dry']:
            lines += ['', '**A dry run without a GPU: it proves that these checks run, and nothing else.**'
                      if machine.DRY else '**Simulated GPUs: nothing here is about speed, NCCL or drivers.**']
        last = None
        for o in self.rows:
            if o['section'] != last:
                lines += ['', f"## {o['section']}", '', '| what | | where | detail |', '|---|---|---|---|']
            last = o['section']
            held = {True: 'holds', False: '**broken**', None: ''}[o['ok']]
            lines.append(f"| {o['what']} | {held} | {o['where']} | {_cell(o['detail'])} |")
        return '\n'.join(lines)+'\n'


def _cell(detail): return str(detail).replace('|', '\\|').replace('\n', '<br>')
