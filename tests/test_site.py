"""The site: which pages there are, what a page of it is made of, and that its links lead somewhere."""
import html.parser, re, subprocess, sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit
import pytest
import fastddp.all      # whose calls are pages

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tools'))
import website


def cell(kind, source): return dict(cell_type=kind, source=source, metadata={}, outputs=[])


def test_every_page_is_listed_once():
    "All documents and notebooks, but what is the index's"
    there = {o.relative_to(root).as_posix() for folder in ('docs', 'nbs', 'benchmarks')
             for kind in ('*.md', '*.ipynb') for o in (root/folder).rglob(kind)
             if not any(p.startswith(('.', '_')) or p == 'results' for p in o.relative_to(root).parts)}
    listed = [o for o in website.PAGES if o not in (*website.api.PAGES, *website.RENDERED)]
    assert len(listed) == len({*listed})
    assert there - {'nbs/index.ipynb'} == {o for o in listed if '/' in o}
    assert [o for o in listed if not (root/o).exists()] == []


def test_its_source_has_every_page(tmp_path):
    "Those that are rendered, too, and no link leads to a page that isn't there"
    source = website.assemble(tmp_path/'source')
    assert [o for o in website.PAGES if not (source/o).exists()] == []
    links = {(o.relative_to(source), t, o.parent/t) for o in source.rglob('*.md')
             for t in re.findall(r'\]\((?![a-z]+:)([^)\s#]+)', o.read_text(encoding='utf-8'))}
    assert [(o, t) for o, t, path in links if not path.exists()] == [] and len(links) > 100


def test_links_to_what_is_no_page():
    "Become text, or lead to the address, if there is one"
    text = '[a](../LICENSE) [b](guide.md#platforms) [c](https://x.y) ![d](lesson.png) [e](../README.md) [f](#top)'
    rest = '[b](guide.md#platforms) [c](https://x.y) ![d](lesson.png) [e](../index.md) [f](#top)'
    assert website.linked(text, 'docs/gpus.md') == f'a {rest}'
    assert website.linked(text, 'docs/gpus.md', 'https://h/a') == f'[a](https://h/a/blob/main/LICENSE) {rest}'


def test_the_folder_of_tutorials_leads_to_the_first():
    assert website.linked('[a](nbs/tutorials)', 'README.md') == f'[a]({website.OTHERS[0]})'


def test_a_call_names_its_functions_and_each_of_its_exceptions():
    "A default by its name, not its address; several exceptions in one line of a docstring"
    def f(a, how=cell): ...
    f.__doc__ = 'Does.\n\n    Raises\n        KeyError, ValueError: no\n            key\n        OSError: no file'
    text = website.api.function('f', f, {})
    assert 'f(a, how=cell)' in text
    assert '- `KeyError`, `ValueError`: no' in text and '\n- `OSError`: no file' in text


def test_options_of_another_function_are_a_list():
    def f(**options): ...
    f.__doc__ = "Does.\n\nOptions:\n    see=(0,): Whose\n    loss='auto': How: 'sum'\n    **more: Others"
    text = website.api.function('f', f, {})
    assert 'Options:\n\n- `see=(0,)`: Whose\n- `loss=\'auto\'`: How: \'sum\'\n- `more`: Others' in text


def test_a_notebooks_cells_without_nbdevs_words():
    nb = dict(cells=[cell('code', '#| default_exp x'), cell('code', '#| export\nx = 1'), cell('code', '#| hide\ny'),
                     cell('markdown', 'z'), cell('code', '#| slow\nw')])
    assert [o['source'] for o in website.for_site(nb, 'nbs/x.ipynb')['cells']] == ['x = 1', 'z', 'w']


def test_outputs_of_older_code_are_left_out(tmp_path, monkeypatch):
    import json
    path, ran = 'nbs/tutorials/vision.ipynb', tmp_path/'nbs'/'tutorials'/'vision.ipynb'
    monkeypatch.setattr(website, 'EXECUTED', tmp_path)
    nb = json.loads((root/path).read_text(encoding='utf-8'))
    code = [o for o in nb['cells'] if o['cell_type'] == 'code']
    for o in code: o['outputs'] = [dict(output_type='stream', name=k, text='x') for k in ('stdout', 'stderr')]
    ran.parent.mkdir(parents=True)
    def outputs(): return sum(len(o.get('outputs', ())) for o in website.with_outputs(path)['cells'])
    assert outputs() == 0
    ran.write_text(json.dumps(nb))
    assert outputs() == len(code)
    code[0]['source'] = 'other()'
    ran.write_text(json.dumps(nb))
    assert outputs() == 0


def stream(text): return dict(output_type='stream', name='stdout', text=text)
def display(**data): return dict(output_type='display_data', metadata={}, data=data)


@pytest.mark.parametrize('output,text', [
    (stream(['a\n', '0 %\r', '50 %\r', '100 %\n']), 'a\n100 %\n'), (stream('a\r\nb'), 'a\r\nb'),
    (stream('0 %\r \r'), None)])
def test_what_a_progress_bar_overwrote_is_gone(output, text):
    assert (website.shown(output) or {}).get('text') == text


def test_a_display_that_became_empty_is_left_out():
    assert website.shown(display(**{'text/html': '', 'text/plain': ''})) is None
    assert website.shown(display(**{'text/html': '<p>', 'text/plain': ''}))


def test_streams_in_a_row_are_one():
    outputs = [stream(['a', 'b']), stream('c\n'), display(text='d'), stream('e'), dict(stream('f'), name='stderr')]
    assert [''.join(o.get('text', '-')) for o in website.joined(outputs)] == ['abc\n', '-', 'e', 'f']


def test_an_update_takes_the_place_of_what_it_updates():
    from IPython.utils.capture import RichOutput
    from notebook_runner import latest
    def show(text, **transient): return RichOutput(dict(text=text), transient=transient)
    shown = latest([show('0 %', display_id='bar'), show('a'), show('100 %', display_id='bar'), show('a')])
    assert [o.data['text'] for o in shown] == ['100 %', 'a', 'a']


class Links(html.parser.HTMLParser):
    "The targets and the anchors of a page"
    def __init__(self, path):
        super().__init__()
        self.targets, self.anchors = set(), set()
        self.feed(path.read_text(encoding='utf-8'))
    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.targets |= {attrs[k] for k in ('href', 'src') if attrs.get(k)}
        self.anchors |= {attrs[k] for k in ('id', 'name') if attrs.get(k)}


def dead_links(folder):
    pages = {o.resolve(): Links(o) for o in folder.rglob('*.html')}
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc: continue
            to = (path.parent/unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not to.exists() or anchor and to in pages and anchor not in pages[to].anchors:
                yield path.relative_to(folder.resolve()).as_posix(), target


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    if not all(map(find_spec, ('sphinx', 'myst_nb', 'furo'))): pytest.skip("Sphinx is not installed: make docs")
    folder = tmp_path_factory.mktemp('site')/'pages'
    done = subprocess.run([sys.executable, '-W', 'ignore', root/'tools'/'website.py', folder], cwd=root, timeout=280,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]+done.stderr[-3000:]
    return folder


@pytest.mark.full
def test_links_lead_somewhere(site):
    assert [*dead_links(site)] == [] and len([*site.rglob('*.html')]) > 100


@pytest.mark.full
def test_the_sidebar_is_for_readers(site):
    "Pages for maintainers are there, and the README leads to them"
    index = (site/'index.html').read_text(encoding='utf-8')
    begin = index.index('sidebar-tree')
    listed, rest = index[begin:index.index('</aside>', begin)], index[index.index('</aside>', begin):]
    assert 'docs/guide.html' in listed and 'nbs/tutorials/vision.html' in listed
    for o in 'CONTRIBUTING', 'docs/modules', 'docs/maintainers/same_answer', 'nbs/launch/508_options':
        assert f'{o}.html' not in listed and (site/f'{o}.html').exists()
    assert 'CONTRIBUTING.html' in rest


@pytest.mark.full
def test_a_dead_link_is_noticed(site):
    targets = 'nowhere.html', 'index.html#no', 'index.html'
    (site/'bad.html').write_text(''.join(f'<a href="{o}"></a>' for o in targets))
    assert {o for _, o in dead_links(site)} == {'nowhere.html', 'index.html#no'}
    (site/'bad.html').unlink()


@pytest.mark.full
def test_an_error_is_found_by_its_text(site):
    "The search index has its words"
    index = (site/'searchindex.js').read_text(encoding='utf-8')
    assert all(f'"{o}"' in index or f'{o}:' in index for o in ('notpickl', 'pickl', 'cantdistribut'))


@pytest.mark.full
def test_pages_of_what_is_called(site):
    "Signature, parameters, returns, raises"
    text = re.sub('<[^>]*>', '', (site/'docs'/'api'/'learner.html').read_text(encoding='utf-8'))
    assert all(o in text for o in ('distrib_fit_one_cycle', 'batch=', 'Exactly these', 'Returns what', 'RankDied:'))
