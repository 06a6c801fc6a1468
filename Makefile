# Everything that is done here, by name. Each target makes its own environment in .venv if it is not there yet.
#   make demo      run the lesson in a real Jupyter kernel, on all GPUs or on 2 CPU workers
#   make test      what a change is likely to break: tests and notebooks
#   make test-changed  the notebooks and tests that a change touches (BASE=rev: since then)
#   make test-all  all there is, one part after the other, and a page of what came out (PARTS="full v1": these)
#   make test-full  all tests and all notebooks, the long ones, too
#   make test-oldest   the tests with fastai 2.7.19, in an environment of its own (.venv-oldest)
#   make test-pythons  the tests with each Python from 3.10 on, one after the other (PYTHONS="3.12 3.13": these)
#   make test-next     the tests with pre-releases of torch and fastai, where the index has them (.venv-next)
#   make test-v1   the tests, notebooks and tutorials of fastai v1, in an environment of its own (.venv-v1)
#   make test-libraries  workflows of libraries that people use with fastai, and their table docs/works_with.md; brings
#                  them into .venv-libraries (8 GB) and, those for an older fastcore, .venv-libraries-old (ONLY="timm peft": these)
#   make bench     all benchmarks, and their tables in benchmarks/README.md (an hour; leave the machine alone meanwhile)
#   make picture   docs/lesson.png, the README's picture of the lesson (runs it first)
#   make docs      the site: build/site/index.html, with the outputs of notebooks that tests or the demo have run
#   make wheel     dist/fastddp-*.whl, from this folder as it is
#   make stubs     render fastddp/all.pyi, what editors complete
#   make readme    render README.md from nbs/index.ipynb
#   make size      count tokens, modules, lines, private functions, and the modules that one fit passes through
#   make sidebar   render nbs/sidebar.yml, the order of the site, from the notebooks' numbers
#   make test-mutants  change 10 lines of the library at random (N=, SEED=), and see whether the tests notice
#   make test-faults  the whole table of failures (`make test` runs a spread of it)
#   make gpu       what is promised about GPUs, checked on this machine's; also without network (GPU_ARGS=--dry: on the CPU)
#   make test-ray  the tests on a Ray cluster of two hosts made of network namespaces (root)
#   make test-kaggle  the tests under the limits of a notebook service: 64 MB of shared memory, 4 cores, 30 GB (root)
#   make clean     remove what demo and tests wrote; `make distclean` removes .venv too
# JOBS=1 runs one file of tests at a time. SELECT= takes the long tests along, where they are left out.
# PYTHON=python3.12 chooses the interpreter for a new environment, VENV=some/folder where it lies.

# Where it is set, each of the hundreds of processes of the tests would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Compiling all modules would take half as long again; Python compiles those that are imported.
PIP := -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile

# Without PYTHON= an environment that exists is used as it is, whatever `python3` means today.
chosen := $(filter-out file default undefined,$(origin PYTHON))
runner := $(if $(chosen),$(PYTHON),$(firstword $(wildcard $(PY)) $(PYTHON)))
missing = $(shell command -v '$(runner)' >/dev/null 2>&1 || { echo '$(runner) not found: Python 3.10 or newer is needed' \
	'(apt-get install python3 python3-venv, or PYTHON=/path/to/python)'; exit; }; \
	'$(runner)' tools/check.py '$(VENV)')
# The environment points at this folder: a copied or moved tree is installed anew.
moved = $(if $(filter $(CURDIR),$(shell cat $(STAMP) 2>/dev/null)),,again)

.PHONY: browser demo picture gpu size test test-changed test-all test-v1 test-oldest test-full test-pythons test-next test-libraries test-faults test-mutants test-ray test-kaggle docs wheel stubs readme sidebar venv check again clean distclean
.NOTPARALLEL:

demo: venv
	@$(PY) tools/demo.py

# Two files of tests at a time: each starts processes of its own, and with more of them two cores took longer (ten files:
# 170 s by two, 187 s by three, 210 s by four). REPORT is a file for what came out.
JOBS ?= 2
SELECT ?= -m 'not full'
side_by_side = -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(REPORT),--junitxml='$(REPORT)')

# What fails beside another file may have waited too long for a core: it is tried again, alone. Both runs are shown
once_more = { echo 'What has failed, once more, alone:'; $(1) $(SELECT) --last-failed --last-failed-no-failures none; }

# Those on two machines come last, alone: a Ray cluster needs both cores.
# The device of tests/simulated_gpu is compiled meanwhile; its tests wait for it
test: venv
	@PYTHONPATH=tests $(PY) -m simulated_gpu.build > /dev/null 2>&1 &
	@$(PY) -m pytest tests $(SELECT) --ignore=tests/machines $(side_by_side) || $(call once_more,$(PY) -m pytest tests)
	@$(PY) -m pytest tests/machines $(SELECT)

size: venv
	@$(PY) tools/size.py --folders --fit

BASE ?= HEAD
test-changed: venv
	@$(PY) tools/changed.py $(BASE) $(SELECT) $(side_by_side)

# wandb is for one long test. Where it is installed, timm imports it, so each process that imports fastai would.
test-full: venv browser
	@$(PY) $(PIP) wandb
	@$(PY) -m pytest tests $(side_by_side)

# Goes on after a part that fails. The page: build/test-all.md
PARTS ?= full ray v1 oldest kaggle
test-all: venv
	@$(PY) tools/test_all.py $(PARTS)

# fastai 1.0.61 asks for libraries that no longer exist, so it goes in without its requirements.
V1 ?= .venv-v1
test-v1: $(V1)/.installed
	@export PYTHONPATH='$(CURDIR)'; $(V1)/bin/python -m pytest tests/v1 $(SELECT) $(side_by_side) || \
		$(call once_more,$(V1)/bin/python -m pytest tests/v1)

$(V1)/.installed: tests/v1/constraints.txt
	@test -x $(V1)/bin/python || $(PYTHON) -m venv --clear $(V1)
	@echo 'Installing fastai 1.0.61 and torch 2.0.1 into $(V1) (5 GB; a few minutes the first time)'
	@$(V1)/bin/python $(PIP) -r tests/v1/constraints.txt
	@$(V1)/bin/python $(PIP) --no-deps fastai==1.0.61
	@touch $@

# The oldest fastai 2.x that settings.ini allows. Left out: what needs nbdev 3, which wants a newer fastcore than fastai 2.7.19 does
# (the notebooks and what is generated from them: the code is the same in both), and the browser, which sees the same HTML.
OLDEST ?= .venv-oldest
OLDEST_PYTHON ?= $(PYTHON)
test-oldest: $(OLDEST)/.installed
	@PYTHONPATH='$(CURDIR)' $(OLDEST)/bin/python -m pytest tests $(SELECT) --ignore=tests/v1 \
		--ignore=tests/test_sync.py --ignore=tests/test_notebooks.py --ignore=tests/test_browser.py $(side_by_side)

$(OLDEST)/.installed: tests/oldest.txt
	@test -x $(OLDEST)/bin/python || $(OLDEST_PYTHON) -m venv --clear $(OLDEST)
	@echo 'Installing fastai 2.7.19 and torch 2.6 into $(OLDEST) (6 GB; a few minutes the first time)'
	@$(OLDEST)/bin/python $(PIP) -r tests/oldest.txt
	@touch $@

# The libraries come without their requirements on versions of fastai, torch and others where those are out of date.
LIBRARIES ?= .venv-libraries
LIBRARIES_OLD ?= .venv-libraries-old
test-libraries: $(LIBRARIES)/.installed $(LIBRARIES_OLD)/.installed
	@OLD='$(CURDIR)/$(LIBRARIES_OLD)/bin/python' $(LIBRARIES)/bin/python tools/works_with.py $(ONLY)

$(LIBRARIES)/.installed: tests/libraries/requirements.txt tests/libraries/without_requirements.txt
	@test -x $(LIBRARIES)/bin/python || $(PYTHON) -m venv --clear $(LIBRARIES)
	@echo 'Installing torch, fastai and the libraries into $(LIBRARIES) (8 GB; some minutes the first time)'
	@$(LIBRARIES)/bin/python $(PIP) -r tests/libraries/requirements.txt -e '.[dev]'
	@$(LIBRARIES)/bin/python $(PIP) --no-deps --no-build-isolation -r tests/libraries/without_requirements.txt
	@touch $@

$(LIBRARIES_OLD)/.installed: tests/oldest.txt tests/libraries/old.txt tests/libraries/old_without_requirements.txt
	@test -x $(LIBRARIES_OLD)/bin/python || $(OLDEST_PYTHON) -m venv --clear $(LIBRARIES_OLD)
	@echo 'Installing fastai 2.7.19 and libraries of its time into $(LIBRARIES_OLD) (6 GB; some minutes the first time)'
	@$(LIBRARIES_OLD)/bin/python $(PIP) -r tests/oldest.txt -r tests/libraries/old.txt
	@$(LIBRARIES_OLD)/bin/python $(PIP) --no-deps -r tests/libraries/old_without_requirements.txt
	@touch $@

# A Python is looked for under pyenv and on PATH. Each environment (6 GB) is removed when its tests have passed.
PYTHONS ?= 3.10 3.11 3.12 3.13
test-pythons:
	@for v in $(PYTHONS); do \
		p=$$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$v.*/bin/python 2>/dev/null | tail -1); \
		echo "== Python $$v: $${p:=python$$v}"; \
		$(MAKE) test VENV=.venv-$$v PYTHON="$$p" && rm -rf .venv-$$v || exit 1; \
	done

NEXT ?= .venv-next
test-next:
	@test -x $(NEXT)/bin/python || $(PYTHON) -m venv --clear $(NEXT)
	@$(NEXT)/bin/python $(PIP) --pre --upgrade \
		torch torchvision fastai -e '.[dev]'
	@$(NEXT)/bin/python -m pip list 2>/dev/null | grep -iE '^(torch|fastai|fastcore|ipython|numpy) '
	@$(NEXT)/bin/python -m pytest tests $(SELECT) --ignore=tests/v1 --ignore=tests/test_browser.py $(side_by_side)

N ?= 10
SEED ?= 0
test-mutants: venv $(V1)/.installed
	@$(PY) tools/mutate.py $(N) $(SEED)

test-faults: venv
	@$(PY) -m pytest tests/faults $(side_by_side)

# Chooses its interpreter itself, and installs nothing that is there.
gpu:
	@$(runner) tools/gpu.py $(GPU_ARGS)

test-ray: venv
	@$(PY) -m pytest tests/machines $(if $(REPORT),--junitxml='$(REPORT)')

test-kaggle: venv
	@$(PY) tools/like_kaggle.py $(PY) -m pytest tests $(SELECT) --ignore=tests/test_browser.py \
		--ignore=tests/v1 $(if $(REPORT),--junitxml='$(REPORT)')

# For tests/test_browser.py, which is skipped without one: Debian's, where we may install it.
browser:
	@command -v chromedriver >/dev/null || ! test "$$(id -u)" = 0 || ! command -v apt-get >/dev/null || { timeout 300 sh -c \
		'apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver'; } >/dev/null 2>&1 || true

# One after the other: they measure. Peers: pip install -e '.[bench]'
BENCHES := launch shapes memory sync throughput step ddp_options inference balance background model machines
bench: venv
	@for b in $(BENCHES); do echo "== $$b"; $(PY) -W ignore benchmarks/$$b.py || exit 1; done
	@$(PY) benchmarks/render.py
	@$(PY) tools/readme.py

DOCS := $(VENV)/.docs
docs: venv $(DOCS)
	@$(PY) tools/website.py

$(DOCS): settings.ini
	@$(PY) $(PIP) -e '.[docs]'
	@touch $@

wheel:
	@rm -rf build/lib
	@'$(runner)' -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

stubs: venv
	@$(PY) tools/stubs.py

picture: demo browser
	@$(PY) tools/picture.py

readme: venv
	@$(PY) tools/readme.py

sidebar: venv
	@$(PY) tools/sidebar.py

venv: $(STAMP)

# $(error) stops make with exactly this one line.
check:
	@$(if $(missing),$(error $(missing)))

again:

# One pip call, so that torch, torchvision and fastai are chosen to fit each other.
$(STAMP): settings.ini setup.py pyproject.toml $(moved) | check
	@test -x $(PY) || $(PYTHON) -m venv --clear $(VENV)
	@echo 'Installing into $(VENV): torch, torchvision, fastai and the rest (a few minutes the first time)'
	@$(PY) $(PIP) torch torchvision fastai -e '.[dev]'
	@echo '$(CURDIR)' > $(STAMP)

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis
	find fastddp nbs tests tools benchmarks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

distclean: clean
	rm -rf $(VENV) $(V1) $(OLDEST) $(NEXT) $(LIBRARIES) $(LIBRARIES_OLD) $(PYTHONS:%=.venv-%)
