"""What a worker shows appears in a real Jupyter kernel, and in a terminal, as if it had been shown there."""
import os, re, sys
from pathlib import Path
import fastprogress.fastprogress, nbclient, nbformat, pexpect, pytest

here = Path(__file__).resolve().parent.parent

CELLS = dict(
    start="import sys; sys.path.insert(0, HERE)\nfrom capture_jobs import Child\nimport builtins\n"
          "def state():\n"
          "    return sys.stdout, sys.stderr, sys.displayhook, sys.excepthook, get_ipython(), builtins.display\n"
          "before = state(); child = Child(METHOD)",
    **{o: f"child.run({o!r});" for o in ('fit live text rich figures bars frames fails loader'.split())},
    again="child.run('fit');",
    quiet="child.run('quiet', rank=1, frontend='silent');",
    others="child.run('text', rank=1, see='all');",
    end="child.close(); print(before == state())")


class Client(nbclient.NotebookClient):
    "Remembers the messages of each cell, as they came, and answers the job `live`"
    messages, answer = {}, None
    def process_message(self, msg, cell, cell_index):
        self.messages.setdefault(cell_index, []).append(msg)
        if "'now'" in str(msg['content'].get('data')): Path(self.answer).touch()
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(scope='module', params=['forkserver', pytest.param('spawn', marks=pytest.mark.full)])
def ran(request, tmp_path_factory):
    "`(outputs, messages)` by cell name"
    answer = str(tmp_path_factory.mktemp('live')/'seen')
    cells = [o.replace('HERE', repr(str(here))).replace('METHOD', repr(request.param)) for o in CELLS.values()]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in cells])
    client = Client(nb, timeout=120, kernel_name='python3', allow_errors=False)
    client.messages, client.answer = {}, answer
    client.execute(env={**os.environ, 'PYTHONPATH': str(here.parent), 'CAPTURE_SEEN': answer})
    return {k: (c.outputs, client.messages[i]) for i, (k, c) in enumerate(zip(CELLS, nb.cells))}


def html(outputs): return [o.data['text/html'] for o in outputs if 'text/html' in o.get('data', {})]
def images(outputs): return [o for o in outputs if 'image/png' in o.get('data', {})]

def texts(outputs, name='stdout'):
    return ''.join(o.text for o in outputs if o.output_type == 'stream' and o.name == name)


@pytest.mark.parametrize('cell', ['fit', 'again'])
def test_fit(ran, cell):
    "One table, grown in place; one graph; the second time as the first"
    outputs, messages = ran[cell]
    tables = [o for o in html(outputs) if '<table' in o]
    assert len(tables) == 1
    assert re.findall(r'<td>(\d+)</td>', tables[0]) == ['0', '1', '2'] and '<progress' not in tables[0]
    assert len(images(outputs)) == 1
    assert [o.output_type for o in outputs].count('display_data') == 3     # styles, table, graph
    assert texts(outputs) == ''
    # of tables, on which a dark theme's text could not be read
    assert '#f8f9fa' not in (styles := ''.join(o for o in html(outputs) if '<style>' in o))
    assert not hasattr(fastprogress.fastprogress, '_style_shown') or 'table.fastprogress' in styles


def test_updates_in_place(ran):
    messages = [m for m in ran['fit'][1] if m['msg_type'] in ('display_data', 'update_display_data')]
    ids = [m['content']['transient'].get('display_id') for m in messages if m['msg_type'] == 'display_data']
    updates = [m['content']['transient']['display_id'] for m in messages if m['msg_type'] == 'update_display_data']
    assert len(ids) == 3 and ids[0] is None and len(set(ids)) == 3
    assert set(updates) == set(ids[1:]) and updates.count(ids[1]) > 3


def test_live(ran):
    "The job waited until the client had its last update: nothing followed that would have pushed it out"
    assert texts(ran['live'][0]) == 'waiting\nseen\n'


def test_text(ran):
    outputs = ran['text'][0]
    assert texts(outputs) == 'one\nno newline\n\n' and texts(outputs, 'stderr') == 'two\n'


def test_rich(ran):
    kinds = [sorted(o.data)[0] if o.output_type == 'display_data' else o.text for o in ran['rich'][0]]
    assert kinds == ['text/html', 'between\n', 'text/markdown', 'text/html']
    assert 'red' in ran['rich'][0][0].data['text/html']


def test_figures(ran):
    assert [o.output_type for o in ran['figures'][0]] == ['display_data', 'stream', 'display_data']


def test_tqdm(ran):
    outputs = ran['bars'][0]
    assert '20/20' in texts(outputs, 'stderr') and texts(outputs, 'stderr').count('\r') >= 1 and not html(outputs)


def test_clear_output(ran): assert texts(ran['frames'][0]) == 'frame 49\n' and len(ran['frames'][0]) == 1


def test_traceback(ran):
    assert texts(ran['fails'][0]) == 'before\n'
    err = texts(ran['fails'][0], 'stderr')
    assert err.startswith('Traceback') and err.count('ZeroDivisionError') == 1 and 'capture_jobs.py' in err


def test_loader_processes(ran):
    assert sorted(texts(ran['loader'][0]).splitlines()) == [f'item {i}' for i in range(4)]


def test_silent_rank(ran):
    outputs = ran['quiet'][0]
    assert len(outputs) == 1 and 'UserWarning: to be seen' in texts(outputs, 'stderr')


def test_other_rank(ran):
    assert texts(ran['others'][0]) == '[rank 1] one\n[rank 1] no newline\n[rank 1] \n'
    assert texts(ran['others'][0], 'stderr') == '[rank 1] two\n'


def test_kernel_as_before(ran): assert texts(ran['end'][0]) == 'True\n'


SCRIPT = f'''
import sys; sys.path.insert(0, {str(here)!r})
if __name__ == '__main__':
    from capture_jobs import Child
    child = Child('forkserver')
    for o in 'fit', 'text', 'rich', 'bars': child.run(o)
    child.close()
'''


@pytest.mark.full
@pytest.mark.parametrize('program', ['', '-m IPython --no-banner --colors=nocolor'])
def test_terminal(program, tmp_path):
    "A script, and IPython's shell: console bars that are drawn over, a row for each epoch, displays as text"
    (tmp_path/'script.py').write_text(SCRIPT)
    env = {**os.environ, 'PYTHONPATH': str(here.parent), 'TERM': 'xterm', 'IPYTHONDIR': str(tmp_path)}
    said = pexpect.run(f'{sys.executable} {program} script.py', cwd=str(tmp_path), env=env, timeout=120,
                       encoding='utf-8', dimensions=(30, 100)).replace('\r\n', '\n')
    assert 'Traceback' not in said, said
    assert re.search(r'\rEpoch 1/3 : \|.+\| 50.00% \[2/4', said)
    seen = [o.rsplit('\r', 1)[-1].split() for o in said.split('\n')]
    assert [o[0] for o in seen if len(o) == 4 and re.match(r'\d+\.\d', o[1])] == ['0', '1', '2'], said
    assert 'one\nno newline\n\n' in said and 'colour' in said and '20/20' in said
    assert '<table' not in said and said.count('IPython.core.display.HTML') == 1      # the job's own
