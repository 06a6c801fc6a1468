"Sphinx's settings for the site, which `make docs` builds from the folder that tools/website.py assembles."
from pathlib import Path

project, author, html_title = 'fastddp', 'fastddp contributors', 'fastddp'
extensions = ['myst_nb']
html_theme = 'furo'
html_static_path, html_css_files = ['static'], ['site.css']
html_search_scorer = str(Path(__file__).parent/'static'/'scorer.js')
html_copy_source = html_show_sphinx = html_show_copyright = html_use_index = False
nb_execution_mode = 'off'           # outputs are those that a test run or the demo left
myst_heading_anchors = 4
highlight_language = 'none'          # a block without a language is output or a drawing
smartquotes = False     # options begin with --
suppress_warnings = ['myst-nb.unknown_mime_type', 'misc.highlighting_failure', 'myst.header']
