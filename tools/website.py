"""Build the site: build/site/index.html, for `make docs`.

    python tools/website.py [FOLDER]       # where the pages go, build/site unless said otherwise

Pages are the Markdown files and notebooks of the repository, assembled in a copy of its tree, so that links between
them stay as they are. Nothing is executed: a notebook has the outputs of its last test run, or none.
"""
import json, os, re, shutil, sys
from configparser import ConfigParser
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).parent))
import api, contract, modules, sidebar

EXECUTED = root/'build'/'executed'


def tutorials(*names): return [f'nbs/tutorials/{o}.ipynb' for o in names]


PLACES = tutorials('kaggle', 'two_machines')
[WORTH_IT] = tutorials('worth_it')
OTHERS = [f'nbs/{o}' for o in sidebar.sections()['tutorials']
          if f'nbs/{o}' not in (*PLACES, WORTH_IT) and o.stem != 'lesson']
# A reader's order; the README is the first page
ORDER = {
    'Begin': ['nbs/lesson.ipynb', WORTH_IT, 'docs/guide.md'],
    'Tutorials': OTHERS,
    'Use': ['docs/same_answer.md', 'docs/what_comes_back.md', 'docs/vocabulary.md', 'nbs/troubles.ipynb'],
    'Where it runs': [*PLACES, 'docs/several_machines.md', 'docs/torchrun.md', 'docs/gpus.md', 'nbs/security.ipynb'],
    'Coming from': ['docs/coming_from.md', 'docs/fastai_v1.md'],
    'How it works': ['docs/how_it_works.md', 'docs/glossary.md', 'docs/works_with.md', 'benchmarks/README.md'],
    'Reference': [*api.PAGES, 'CHANGELOG.md']}
# The first of those for maintainers: the README leads to it, the sidebar has none of them
MAINTAINERS = 'CONTRIBUTING.md'
# Pages that are nowhere but on the site
RENDERED = {'docs/modules.md': modules.render, 'docs/maintainers/same_answer.md': contract.render}
# Pages that others are filed under
UNDER = {MAINTAINERS: ['docs/modules.md', 'docs/maintainers/same_answer.md', 'docs/maintainers/upstream.md',
                       'SECURITY.md'],
         'docs/modules.md': [f'nbs/{o}' for v in sidebar.folders().values() for o in v],
         'docs/fastai_v1.md': [f'nbs/{o}' for o in sidebar.sections()['tutorials for fastai v1']]}
LISTED = {o for v in (*ORDER.values(), *UNDER.values()) for o in v}
# A new document comes last, until it gets its place
ORDER['Use'] += sorted(o for o in (f'docs/{p.name}' for p in (root/'docs').glob('*.md')) if o not in LISTED)
PAGES = [MAINTAINERS, *(o for v in (*ORDER.values(), *UNDER.values()) for o in v)]
SAME = {'README.md': 'index.md', 'nbs/index.ipynb': 'index.md', 'nbs/tutorials': OTHERS[0]}


# Pages that are a section of the guide now: addresses that others may have kept
MOVED = dict(which_call='which-call-when', options='options', learning_rate='batch-and-learning-rate',
             jobs='in-the-background', checkpoints='checkpoints', long_fits='a-tab-that-is-closed',
             workstation='which-gpus', course='the-fastai-course', editors='vs-code-colab-kaggle',
             vscode_colab='vs-code-colab-kaggle')


def address():
    "Where the repository lives, '' if it has no address yet"
    cfg = ConfigParser(delimiters=['='], interpolation=None)
    cfg.read(root/'settings.ini', encoding='utf-8')
    return cfg['DEFAULT']['git_url'].rstrip('/')


def linked(text, page, home=''):
    "`text` of `page` with links to what is no page led to the repository's address, or taken out"
    folder = Path(page).parent
    def link(found):
        mark, said, target = found.groups()
        if mark or re.match(r'[a-z]+:|#', target): return found[0]
        path, _, anchor = target.partition('#')
        path = os.path.normpath(folder/path)
        path = SAME.get(path, path)
        if path in {*PAGES, 'index.md'}:
            return f"[{said}]({os.path.relpath(path, folder)}{'#'*bool(anchor)}{anchor})"
        return f'[{said}]({home}/blob/main/{path})' if home else said
    return re.sub(r'(!?)\[([^\]]*)\]\(([^)\s]+)\)', link, text)


def drawn(text, folder):
    "Pictures that are drawn, put into the page, where they follow its light and dark"
    def inline(found):
        svg = (root/folder/found[2]).read_text(encoding='utf-8')
        return f'```{{raw}} html\n{svg}\n```'
    return re.sub(r'!\[([^\]]*)\]\(([^)\s]+\.svg)\)', inline, text)


def directives(source):
    "nbdev's words at the top of a cell, and the rest of it"
    words, rest = [], source.split('\n')
    while rest and rest[0].startswith('#|'): words.append(rest.pop(0)[2:].strip().split(':')[0].split(' ')[0])
    return words, '\n'.join(rest).strip('\n')


def sources(nb): return [''.join(o['source']) for o in nb['cells'] if o['cell_type'] == 'code']


def shown(output):
    "`output` as a reader sees it in the end, None if that is nothing: what a carriage return overwrote is gone"
    if output['output_type'] == 'stream':
        if output['name'] == 'stderr': return None
        output = {**output, 'text': re.sub(r'[^\n]*\r(?!\n)', '', ''.join(output['text']))}
        return output if output['text'].strip() else None
    return output if any(output.get('data', {1: 1}).values()) else None


def joined(outputs):
    "Streams that follow each other as one, as Jupyter shows them"
    res = []
    for o in outputs:
        last = res[-1] if res else {}
        if o['output_type'] == 'stream' and last.get('name') == o['name']:
            res[-1] = {**last, 'text': ''.join([*last['text'], *o['text']])}
        else: res.append(o)
    return res


def with_outputs(path):
    "The notebook as it last ran, if its code is still the same"
    nb = json.loads((root/path).read_text(encoding='utf-8'))
    ran = root/'build'/'demo'/'lesson.ipynb' if path == 'nbs/lesson.ipynb' else EXECUTED/path
    if not ran.exists(): return nb
    done = json.loads(ran.read_text(encoding='utf-8'))
    if sources(done) != sources(nb): return nb
    outputs = iter([o['outputs'] for o in done['cells'] if o['cell_type'] == 'code'])
    for o in nb['cells']:
        if o['cell_type'] == 'code': o['outputs'] = joined(filter(None, map(shown, next(outputs))))
    return nb


def for_site(nb, path, home=''):
    "A notebook's cells without nbdev's words, and without those that a reader isn't meant to see"
    cells = []
    for cell in nb['cells']:
        text = ''.join(cell['source'])
        if cell['cell_type'] == 'code':
            words, text = directives(text)
            if not text or {'hide', 'default_exp'} & {*words}: continue
        else: text = linked(text, path, home)
        cells.append({**cell, 'source': text})
    return {**nb, 'cells': cells, 'metadata': dict(kernelspec=dict(name='python3', display_name='python3'),
                                                   language_info=dict(name='python'))}


def toctree(pages, caption=''):
    names = '\n'.join('/' + o.rsplit('.', 1)[0] for o in pages)
    caption = f':caption: {caption}\n' if caption else ''
    return f'\n\n```{{toctree}}\n:hidden:\n{caption}\n{names}\n```\n'


def assemble(folder):
    "The source of the site, in a new folder"
    shutil.rmtree(folder, ignore_errors=True)
    home = address()
    for page, text in api.pages().items():
        (folder/page).parent.mkdir(parents=True, exist_ok=True)
        (folder/page).write_text(linked(text, page, home), encoding='utf-8')
    for page in PAGES:
        target = folder/page
        target.parent.mkdir(parents=True, exist_ok=True)
        if page.endswith('.ipynb'): target.write_text(json.dumps(for_site(with_outputs(page), page, home)))
        elif page not in api.PAGES:
            text = RENDERED[page]() if page in RENDERED else (root/page).read_text(encoding='utf-8')
            text = drawn(linked(text, page, home), Path(page).parent)
            if page in UNDER: text += toctree(UNDER[page])
            if page == MAINTAINERS: text = f'---\norphan: true\n---\n\n{text}'
            target.write_text(text, encoding='utf-8')
    readme = linked((root/'README.md').read_text(encoding='utf-8'), 'README.md', home)
    trees = ''.join(toctree(pages, caption) for caption, pages in ORDER.items())
    (folder/'index.md').write_text(readme+trees, encoding='utf-8')
    for o in (root/'docs').glob('*.png'): shutil.copy(o, folder/'docs')
    return folder


def build(target):
    "Returns Sphinx's exit code; a warning, such as a link that leads nowhere, is an error"
    from sphinx.cmd.build import main
    source = assemble(target.parent/f'{target.name}-source')
    code = main(['-q', '-W', '--keep-going', '-c', str(root/'docs'), str(source), str(target)])
    for name, section in MOVED.items():
        goes = f'<meta http-equiv="refresh" content="0; url=guide.html#{section}">'
        (target/'docs'/f'{name}.html').write_text(f'<!doctype html><title>fastddp</title>{goes}\n')
    return code


if __name__ == '__main__':
    target = Path(sys.argv[1]).resolve() if sys.argv[1:] else root/'build'/'site'
    code = build(target)
    print(f'The site: {target/"index.html"}')
    sys.exit(code)
