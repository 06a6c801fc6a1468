"Everything that settings.ini says, in setuptools' words."
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

cfg = ConfigParser(delimiters=['='], interpolation=None)
cfg.read(Path(__file__).with_name('settings.ini'), encoding='utf-8')
cfg = cfg['DEFAULT']
statuses = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable']
readme = Path(__file__).with_name('README.md')
home = cfg['git_url'].rstrip('/')


def for_elsewhere(text):
    "The README's links lead into the repository; where that has no address (yet), they become plain text"
    images, links = r'!\[([^]]*)\]\((?![a-z]+:)([^)]+)\)\n*', r'(?<!!)\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)'
    text = re.sub(images, rf'![\1]({home}/raw/main/\2)\n\n' if home else '', text)
    return re.sub(links, rf'[\1]({home}/blob/main/\2)' if home else r'\1', text)


urls = {'Source': home, 'Changelog': f'{home}/blob/main/CHANGELOG.md', 'Issues': f'{home}/issues'}

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], author=cfg['author'],
    url=home or None, project_urls=urls if home else {},
    license=cfg['license'], license_files=['LICENSE'], keywords=cfg['keywords'].split(),
    long_description=for_elsewhere(readme.read_text(encoding='utf-8')) if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    packages=find_packages(include=[cfg['lib_path'], f"{cfg['lib_path']}.*"]), python_requires=f">={cfg['min_python']}",
    install_requires=cfg['requirements'].split(),
    package_data={cfg['lib_path']: ['py.typed', '*.pyi']},
    extras_require={o: cfg[f'{o}_requirements'].split() for o in ('dev', 'bench', 'ray', 'docs')},
    entry_points={'nbdev': [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"]},
    classifiers=[f"Development Status :: {statuses[int(cfg['status']) - 1]}",
                 'Framework :: Jupyter', 'Intended Audience :: Developers',
                 'Programming Language :: Python :: 3', 'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    zip_safe=False)
