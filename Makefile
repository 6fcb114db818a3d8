# make demo       install into .venv and train a tiny BLOOM: the shortest way to see distexp work
# make test       install the test tools and run all tests except the slow ones (at most 9 minutes on two cores)
#                 The Slurm tests need root and Slurm's packages; without: make test TESTS="-m 'not slow and not slurm'"
# make test-slow  run the slow tests: kill and resume, more workers, every preset
# make test-all   run both at once, as the continuous integration does: the waits of some tests cost no time then
# make test-release  run the rest of long lists: every type of model with each way to cut it, every bug of the museum
# make test-oldest  run the tests of models, plans and strategies with the oldest versions that pyproject.toml allows
# make lint       run ruff, mypy and codespell
# make docs       build the documentation site into site/; a broken link is an error
# make setup      install only
# make pins       resolve the versions in requirements.txt again

VENV := .venv
BIN := $(VENV)/bin
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
# uv if it is installed, else the one that goes into the environment
UV = $(or $(shell command -v uv),$(BIN)/uv)
INSTALL = $(UV) pip install --quiet --python $(BIN)/python --constraint requirements.txt
# DeepSpeed's build needs the installed torch, so torch comes first and the build is not isolated.
FIRST := torch torchvision setuptools ninja wheel
PROJECT := --no-build-isolation-package deepspeed --editable
# Many tests wait for processes, so four files of tests run at a time on two cores. tests/conftest.py orders the files.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-slow test-all test-release test-oldest lint docs pins
setup: $(VENV)/.setup

$(VENV)/.uv:
	@test -n "$(PYTHON)" || { echo "distexp needs Python 3.11 or 3.12. Name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	command -v uv >/dev/null || $(BIN)/python -m pip install --quiet uv
	touch $@

$(VENV)/.setup: $(VENV)/.uv requirements.txt pyproject.toml
	@echo "Installing PyTorch, DeepSpeed and distexp into $(VENV). The first download has several GB, and shows no progress."
	$(INSTALL) $(FIRST)
	$(INSTALL) $(PROJECT) '.[adapters,vision]'
	touch $@

$(VENV)/.test: $(VENV)/.setup
	$(INSTALL) $(PROJECT) '.[test]'
	touch $@

$(VENV)/.docs: $(VENV)/.setup
	$(INSTALL) $(PROJECT) '.[docs]'
	touch $@

demo: setup
	$(BIN)/python -m distexp

test: $(VENV)/.test
	@echo "All tests except the slow ones: at most 9 minutes on two free cores. The numbers at the right count the tests."
	$(PYTEST) -m "not slow" $(TESTS)

test-slow: $(VENV)/.test
	$(PYTEST) -m "slow and not release" $(TESTS)

test-all: $(VENV)/.test
	$(PYTEST) -m "not release" $(TESTS)

test-release: $(VENV)/.test
	$(PYTEST) -m release $(TESTS)

# The versions of torch and torchvision are the lowest ones of pyproject.toml. They come first, for the build of DeepSpeed.
OLDEST := .venv-oldest
$(OLDEST)/.test: $(VENV)/.uv pyproject.toml
	$(UV) venv --quiet --clear --python $(BIN)/python $(OLDEST)
	$(UV) pip install --quiet --python $(OLDEST)/bin/python 'torch==2.11.*' 'torchvision==0.26.*' 'setuptools<82' ninja wheel
	$(UV) pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct $(PROJECT) '.[test]'
	touch $@

test-oldest: $(OLDEST)/.test
	$(OLDEST)/bin/python -m pytest --numprocesses 4 --dist loadfile -m "not slow and not slurm" \
		tests/models tests/plan tests/strategies tests/system tests/training tests/verify $(TESTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(VENV)/.docs
	$(BIN)/zensical build --strict --clean

# The versions of torch and torchvision are chosen here; all others follow from them and pyproject.toml.
pins: $(VENV)/.uv
	printf '%s\n' torch==2.13.0 torchvision==0.28.0 setuptools ninja wheel | \
	$(UV) pip compile --quiet --python $(BIN)/python --upgrade --python-version 3.11 --python-platform linux \
		--no-emit-index-url --no-annotate --custom-compile-command 'make pins' \
		--extra test --extra docs --output-file requirements.txt pyproject.toml -
