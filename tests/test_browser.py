"""A fit in a real browser: the bar moves, the table grows, the interrupt button works. Pictures stay in
build/browser/."""
import contextlib, ctypes, json, os, secrets, shutil, signal, socket, subprocess, sys, tempfile, time, urllib.request
from pathlib import Path
import nbformat, pytest
from test_start import IMPORTS
from traces import children, left_after

root = Path(__file__).resolve().parent.parent
PICTURES = root/'build'/'browser'
webdriver = pytest.importorskip('selenium.webdriver', reason='selenium is not installed (pip install -e .[dev])')
pytest.importorskip('jupyterlab', reason='jupyterlab is not installed (pip install -e .[dev])')
CHROMIUM, DRIVER = shutil.which('chromium'), shutil.which('chromedriver')
pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=
              'no chromium or chromedriver (apt-get install chromium chromium-driver)')]
CELL = 240   # seconds for a cell, on a busy machine


def die_with_parent(): ctypes.CDLL(None).prctl(1, signal.SIGTERM)   # PR_SET_PDEATHSIG: a killed pytest leaves no server


class Lab:
    "JupyterLab on loopback with a token and folders of its own"
    def __init__(self, home):
        self.notebooks, self.token = home/'notebooks', secrets.token_hex(16)
        self.notebooks.mkdir()
        self._settings(home/'settings'/'@jupyterlab')
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            self.url = f'http://127.0.0.1:{s.getsockname()[1]}'
        dirs = dict(JUPYTER_CONFIG_DIR='config', JUPYTER_DATA_DIR='data', JUPYTER_RUNTIME_DIR='runtime',
                    IPYTHONDIR='ipython',
                    JUPYTERLAB_SETTINGS_DIR='settings', JUPYTERLAB_WORKSPACES_DIR='workspaces')
        options = ['--no-browser', '--allow-root', '--ServerApp.ip=127.0.0.1',
                   f'--ServerApp.port={self.url.rpartition(":")[2]}',
                   '--ServerApp.port_retries=0', f'--IdentityProvider.token={self.token}',
                   f'--ServerApp.root_dir={self.notebooks}',
                   '--LabApp.expose_app_in_browser=True', '--ServerApp.terminals_enabled=False']
        self.log = home/'log'
        with open(self.log, 'w') as log:
            self.process = subprocess.Popen([sys.executable, '-m', 'jupyterlab', *options], stdout=log,
                                            stderr=subprocess.STDOUT,
                                            env={**os.environ, **{k: str(home/v) for k, v in dirs.items()}},
                                            preexec_fn=die_with_parent)
    def _settings(self, folder):
        for name, values in {'apputils-extension/notification': dict(fetchNews='false', checkForUpdates=False,
                                                                     doNotDisturbMode=True),
                             'notebook-extension/tracker': dict(windowingMode='none'),
                             'docmanager-extension/plugin': dict(autosave=False)}.items():
            path = folder/f'{name}.jupyterlab-settings'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
    def ask(self, path, method='GET'):
        request = urllib.request.Request(f'{self.url}/api/{path}', method=method,
                                         headers={'Authorization': f'token {self.token}'})
        with urllib.request.urlopen(request, timeout=15) as r: return r.read()
    def wait(self):
        end = time.monotonic()+120
        while True:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            with contextlib.suppress(OSError): return self.ask('status')
            time.sleep(.1)
    def close(self):
        with contextlib.suppress(Exception):    # kernels first: a busy one may outlive its server
            for kernel in json.loads(self.ask('kernels')): self.ask(f"kernels/{kernel['id']}", 'DELETE')
        self.process.terminate()
        try: self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


FLAGS = ('headless=new', 'no-sandbox', 'disable-gpu', 'disable-quic', 'no-first-run', 'disable-background-networking',
         'disable-component-update', 'disable-sync', 'disable-dev-shm-usage', 'disable-background-timer-throttling',
         'disable-renderer-backgrounding', 'disable-backgrounding-occluded-windows', 'window-size=1400,1000')
PANEL = '.jp-NotebookPanel:not(.lm-mod-hidden)'
BARS = f"[...document.querySelectorAll('{PANEL} .jp-OutputArea-output progress')].map(o=>o.value)"
ROWS = f"document.querySelectorAll('{PANEL} table.fastprogress tbody tr').length"
TEXT = f"[...document.querySelectorAll('{PANEL} .jp-OutputArea-output')].map(o=>o.textContent).join('\\n')"
IDLE = ("(()=>{const n=jupyterapp.shell.currentWidget; return n.sessionContext.session.kernel.status=='idle' && "
        "n.content.widgets.every(c=>!c.promptNode.textContent.includes('*'))})()")
READY = ("(()=>{const w=window.jupyterapp&&jupyterapp.shell.currentWidget, s=w&&w.sessionContext; return "
         "!!(s&&s.isReady&&s.session&&"
         "s.session.kernel&&s.session.kernel.status=='idle'&&w.context.isReady&&w.content.widgets.length)})()")


class Page:
    "A browser with a notebook open"
    def __init__(self, profile):
        os.environ.update(SE_OFFLINE='true', SE_AVOID_STATS='true')
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for o in (*FLAGS, f'user-data-dir={profile}'): options.add_argument(f'--{o}')
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.driver.set_script_timeout(20)
        # Without a screen the tab may count as hidden, and a hidden tab's timers sleep: JupyterLab then never starts.
        self.driver.execute_cdp_cmd('Emulation.setFocusEmulationEnabled', dict(enabled=True))
        self.driver.execute_cdp_cmd('Page.setWebLifecycleState', dict(state='active'))
    def js(self, expression): return self.driver.execute_script(f'return {expression}')
    def until(self, expression, limit=CELL):
        end = time.monotonic()+limit
        while not self.js(expression):
            if time.monotonic() > end:
                self.picture('failed')
                raise TimeoutError(f'{expression}\n{self.js(TEXT)}')
            time.sleep(.1)
    def picture(self, name): self.driver.save_screenshot(str(PICTURES/f'{name}.png'))
    def open(self, lab, name):
        self.driver.get(f'{lab.url}/lab/tree/{name}?token={lab.token}&reset')
        self.until(READY, 240)
    def run_all(self): self.js("jupyterapp.commands.execute('notebook:run-all-cells') && 1")
    def picture_of_cell(self, i, name):
        "With the cell's last lines in sight, since these say what to do"
        self.js(f"document.querySelectorAll('{PANEL} .jp-CodeCell')[{i}].scrollIntoView({{block: 'end'}}) || 1")
        time.sleep(.3)      # drawn
        self.picture(name)
    def click_interrupt(self):
        self.driver.find_element('css selector', f"{PANEL} jp-button[data-command='notebook:interrupt-kernel']").click()


@pytest.fixture(autouse=True)
def leaves_nothing(): "Server, kernels and browser live as long as the module: `all_gone` looks afterwards"


@pytest.fixture(scope='module', autouse=True)
def all_gone():
    before = children()
    yield
    left = left_after(children, before)
    for o in left: o.kill()
    assert not left


@pytest.fixture(scope='module')
def lab(all_gone):
    PICTURES.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix='lab-'))
    lab = Lab(home)
    try:
        lab.wait()
        yield lab
    finally:
        lab.close()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope='module')
def page(all_gone):
    profile, was = tempfile.mkdtemp(prefix='chromium-'), dict(os.environ)
    page = Page(profile)
    yield page
    page.driver.quit()
    shutil.rmtree(profile, ignore_errors=True)
    os.environ.clear()
    os.environ.update(was)


def write_cells(lab, name, cells, tags=()):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in cells])
    for c in nb.cells: c.metadata['tags'] = [*tags]
    nb.metadata['kernelspec'] = dict(name='python3', display_name='Python 3', language='python')
    nbformat.write(nb, lab.notebooks/name)


def write(lab, name, epochs):
    cells = [f"""import sys; sys.path.insert(0, {str(root/'tests')!r})
from fastai.basics import *
from fastddp.all import *
from faults import Slow
from learners import make_learner
learn = make_learner(cbs=[Slow(.1, {str(lab.notebooks)!r})])""", f'learn.distrib_fit({epochs}, nprocs=2)',
             "print('recorded', len(learn.recorder.lrs), 'epochs', len(learn.recorder.values))"]
    write_cells(lab, name, cells)


def test_bar_moves_and_table_grows(lab, page):
    write(lab, 'fit.ipynb', 3)
    page.open(lab, 'fit.ipynb')
    page.run_all()
    seen, rows = set(), set()
    end = time.monotonic()+CELL
    pictured = False
    page.until(f'{BARS}.length > 0')
    while not page.js(IDLE):
        assert time.monotonic() < end
        bars = page.js(BARS)
        if len(bars) == 2: seen.add(tuple(bars))
        rows.add(page.js(ROWS))
        if not pictured and len(bars) == 2 and bars[0] == 1 and bars[1] >= 2: pictured = page.picture('middle') or True
        time.sleep(.05)
    page.picture('end')
    assert pictured and len(seen) >= 8 and {0, 1, 2, 3} >= rows and len(rows) >= 3, (seen, rows)
    assert page.js(ROWS) == 3 and page.js(f'{BARS}.length') == 0
    text = page.js(TEXT)
    assert '2 workers' in text and '3 epochs in' in text and 'recorded 21 epochs 3' in text


CELL_BARS = f"[...document.querySelectorAll('{PANEL} .jp-CodeCell')].map(c=>[...c.querySelectorAll('progress')].length)"
COUNTED = f"document.querySelectorAll('{PANEL} .jp-CodeCell')[2].textContent"


def test_a_job_beside_other_cells(lab, page):
    "The bars of a job move in the cell that began it, while another cell counts; `job` shows the same in its own cell"
    setup = f"""import sys, time; sys.path.insert(0, {str(root/'tests')!r})
from fastai.basics import *
from fastddp.all import *
from faults import Slow
from learners import make_learner
learn = make_learner(cbs=[Slow(.1, {str(lab.notebooks)!r})])"""
    count = """for i in range(60):
    print('counted', i)
    time.sleep(.1)"""
    write_cells(lab, 'job.ipynb', [setup, 'job = learn.distrib_fit(12, nprocs=2, wait=False)', count, 'job',
                                   "job.result()\nprint('recorded', len(learn.recorder.values))"])
    page.open(lab, 'job.ipynb')
    page.run_all()
    page.until(f"{COUNTED}.includes('counted 5')")
    seen, bars, end = set(), [], time.monotonic()+CELL
    while 'counted 59' not in (counted := page.js(COUNTED)):
        assert time.monotonic() < end
        at = counted.rpartition('counted ')[2][:2]
        moved, cells = tuple(page.js(BARS)), page.js(CELL_BARS)
        if len(moved) == 2:
            seen.add((at, moved))
            assert cells[1] == 2 and not cells[2], cells
        if len(seen) == 8: page.picture('job beside a cell')
        time.sleep(.1)
    assert len({at for at, _ in seen}) >= 8 and len({moved for _, moved in seen}) >= 8, seen
    page.until(f"{CELL_BARS}[3] == 2")      # `job`, in a cell of its own
    assert page.js(CELL_BARS)[1] == 2
    page.picture('job in two cells')
    page.until(f"{TEXT}.includes('recorded 12')")
    page.until(IDLE)
    page.picture('job, done')
    assert page.js(f'{BARS}.length') == 0 and page.js(ROWS) == 24 and page.js(TEXT).count('12 epochs in') == 2


# How far apart text and background of the report are, from 0 to 1
CONTRAST = """(()=>{
    const light = c=>{ const [r,g,b] = c.match(/[\\d.]+/g).map(Number); return (.2126*r+.7152*g+.0722*b)/255 };
    const style = o=>getComputedStyle(o);
    const text = document.querySelector('PANEL .jp-OutputArea-output div[style*="max-width"]');
    let behind = text;
    while(/, 0\\)$/.test(style(behind).backgroundColor)) behind = behind.parentElement;
    return Math.abs(light(style(text).color)-light(style(behind).backgroundColor)) })()""".replace('PANEL', PANEL)


def test_report_and_job_on_light_and_dark(lab, page):
    cells = [f"""import sys; sys.path.insert(0, {str(root/'tests')!r})
from fastddp.all import *
from learners import make_learner
learn = make_learner()""",
             'job = learn.distrib_fit(3, nprocs=2, wait=False)\njob.result()', 'learn.distrib_report']
    write_cells(lab, 'report.ipynb', cells)
    page.open(lab, 'report.ipynb')
    page.run_all()
    page.until(f"{TEXT}.includes('waiting for data')")
    page.until(IDLE)
    try:
        for theme in 'Dark', 'Light':
            page.js(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {theme}'}}) && 1")
            page.until(f"document.body.dataset.jpThemeLight == '{str(theme == 'Light').lower()}'")
            page.until(f"{CONTRAST} > .5", 20)
            page.picture_of_cell(2, f'report, {theme.lower()}')
    finally: page.js("jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'}) && 1")


def test_interrupt_button(lab, page):
    write(lab, 'stop.ipynb', 100)
    page.open(lab, 'stop.ipynb')
    page.run_all()
    page.until(f'{BARS}.length == 2 && {BARS}[1] >= 3')
    page.click_interrupt()
    page.until(f"{TEXT}.includes('KeyboardInterrupt')", 20)     # of the 200 s that the fit would take
    page.until(IDLE)
    assert "learn holds the last finished batch; learn.distrib_resume() begins with" in page.js(TEXT)
    page.picture('stop')


FIRST = """import os, sys
os.environ['PYTHONPATH'] = os.pathsep.join([{folder!r}, os.environ.get('PYTHONPATH', '')])
sys.path.insert(0, {tests!r})
from fastddp.process import helper
helper.preload('imports_for_long')
from fastai.basics import *
from fastddp.all import *
from learners import make_learner
learn = make_learner()"""


def test_first_call(lab, page):
    "A line says what is waited for, and goes"
    go = lab.notebooks/'go'
    (lab.notebooks/'imports_for_long.py').write_text(IMPORTS.format(go=str(go)))
    setup = FIRST.format(folder=str(lab.notebooks), tests=str(root/'tests'))
    write_cells(lab, 'first.ipynb', [setup, 'learn.distrib_fit_one_cycle(2, nprocs=2)'])
    page.open(lab, 'first.ipynb')
    page.run_all()
    page.until(f"{TEXT}.includes('first time in this kernel: importing torch and fastai')")
    page.picture('first call')
    go.touch()
    page.until(f"{TEXT}.includes('2 epochs in')")
    page.until(IDLE)
    page.picture('first call, done')
    assert 'starting' not in page.js(TEXT)


MISTAKES = ["""import numpy as np
from fastai.vision.all import *
from fastddp.all import *
folder = Path({folder!r})/'pictures'
folder.mkdir()
for i in range(40): PILImage.create(np.full((16, 16, 3), 6*i, dtype='uint8')).save(folder/f'{{i % 2}}_{{i}}.png')
def label(name): return name[0]
def learner(fnames):
    dls = ImageDataLoaders.from_name_func(folder, fnames, label, valid_pct=.2, bs=4, num_workers=2)
    return Learner(dls, nn.Sequential(Flatten(), nn.Linear(3*16*16, 2)), loss_func=CrossEntropyLossFlat())
learn = learner(get_image_files(folder))""", """class Mine(Callback):
    def after_pred(self): self.scale = self.factor*2
learn.distrib_fit(1, nprocs=2, cbs=Mine())""", """(folder/'1_7.png').write_bytes(b'no picture')
learn.distrib_fit(1, nprocs=2)""", "learn.distrib_fit(1, nprocs=0)"]
SAYS = {'own error': 'factor', 'bad file': 'UnidentifiedImageError', 'refusal': 'a whole number of workers'}


@pytest.mark.full
def test_mistakes(lab, page):
    "What one sees of an error in one's own callback, of a file that is no picture, of an option that can't be"
    cells = [o.format(folder=str(lab.notebooks)) if 'folder!r' in o else o for o in MISTAKES]
    write_cells(lab, 'mistakes.ipynb', cells, tags=['raises-exception'])
    page.open(lab, 'mistakes.ipynb')
    page.run_all()
    page.until(f"{TEXT}.includes({SAYS['refusal']!r})")
    page.until(IDLE)
    for i, (name, words) in enumerate(SAYS.items(), 1):
        assert words in page.js(f"document.querySelectorAll('{PANEL} .jp-CodeCell')[{i}].textContent"), name
        page.picture_of_cell(i, name)
