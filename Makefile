# Targets that need .venv make it from the lock file first, once.
SHELL := /bin/bash
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: help setup train test test-all test-slurm lint format bench results stages gpu wheels clean

help:
	@echo 'make setup       create .venv from the lock file (targets that need it do so first)'
	@echo 'make train       train a small TRM on Sudoku: the first thing to try, 2 minutes'
	@echo 'make test        the fast tests, 4 minutes on two cores'
	@echo 'make test-all    the slow ones too, 45 minutes'
	@echo 'make test-slurm  a private Slurm of two nodes; as root'
	@echo 'make lint        ruff and mypy; make format fixes what ruff can'
	@echo 'make results     evaluates the weights that are in weights/, 3 minutes'
	@echo 'make bench       the tables of RESULTS.md'
	@echo 'make gpu         tests and measurements on a GPU machine: docs/hardware.md'

setup: .venv/ready

train: .venv/first
	$(PY) pretrain.py experiment=demo

# Two test processes with one thread each: with more, they would wait for each other in every matrix
# product.
test: .venv/ready
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: .venv/ready
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slurm'

# Starts a private Slurm with two nodes on this machine; needs root and Debian's slurmctld slurmd
# slurm-client munge.
test-slurm: .venv/ready
	$(PY) -m pytest -rs -m slurm tests/slurm

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/ready
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: .venv/ready
	@failed=; \
	for file in tests/bench/bench_*.py; do \
		name=$${file%.py}; name=$${name//\//.}; \
		echo; echo "== $$name"; \
		$(PY) -m $$name || failed="$$failed $$name"; \
	done; \
	test -z "$$failed" || { echo; echo "failed:$$failed"; exit 1; }

# SUDOKU=FOLDER adds the published boards; see weights/README.md.
results: .venv/ready
	OMP_NUM_THREADS=1 $(PY) -m tests.bench.results $(if $(SUDOKU),--sudoku $(SUDOKU))

# Trains a digit net as one process, then on ranks; DATA=FOLDER for MNIST. See
# docs/synchronising.md.
stages: .venv/ready
	$(PY) -m tests.bench.stages

# On a GPU machine: tests and speeds, with the Python that has torch there. See
# docs/hardware.md.
gpu:
	$(if $(filter command,$(firstword $(origin PYTHON))),$(PYTHON),$(if $(wildcard $(PY)),$(PY),$(PYTHON))) -m tests.gpu

# Fills wheels/ for `make gpu` on a machine without a network: the lock file, except packages that
# come with torch, serve development, or are too large (datasets takes pyarrow and pandas from the
# machine). Python 3.12, x86-64 Linux.
LEFT_OUT := torch playwright greenlet filelock sympy mpmath networkx Jinja2 MarkupSafe numpy pandas \
	pyarrow scipy scikit-learn joblib threadpoolctl narwhals transformers regex rich typer \
	shellingham markdown-it-py mdurl annotated-doc mypy mypy_extensions librt ast_serialize \
	pathspec ruff pytest-xdist execnet hydra-optuna-sweeper optuna alembic colorlog Mako SQLAlchemy pillow \
	lion-pytorch prodigyopt schedulefree
LINUX := $(addprefix --platform manylinux,_2_28_x86_64 _2_27_x86_64 _2_17_x86_64 2014_x86_64 1_x86_64)
wheels: .venv/ready
	rm -rf wheels
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir wheels $$(grep '^antlr4' requirements.lock)
	$(PY) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $(LINUX) --dest wheels \
		$$(grep -vE '^($(subst $() ,|,$(strip $(LEFT_OUT)))|antlr4-python3-runtime)==' requirements.lock)
	du -sh wheels; test $$(du -sm wheels | cut -f1) -le 64

# uv is used where it is installed. torch goes first and alone, so that no other package pulls in a
# second build of it. A first run needs 20 packages of some 90.
FIRST := numpy hydra-core omegaconf safetensors filelock pydantic tqdm typing_extensions
INSTALL := $(if $(shell command -v uv),uv pip install --python $(PY),$(PY) -m pip install --disable-pip-version-check)
.venv/first: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed," \
		f" this is {sys.version.split()[0]}; run make PYTHON=python3.12")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(INSTALL) -c requirements.lock torch
	$(INSTALL) -c requirements.lock $(FIRST)
	touch $@

.venv/ready: .venv/first
	$(INSTALL) -r requirements.lock
	touch $@

clean:
	rm -rf .venv wheels .mypy_cache .ruff_cache .pytest_cache
