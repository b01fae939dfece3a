# make train, make test: each sets up .venv from the lock file first, once.
SHELL := /bin/bash
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: train test test-all lint format bench clean

train: .venv/ready
	$(PY) pretrain.py experiment=demo

# two processes side by side: most tests wait for ranks to start, and few keep both cores busy
test: .venv/ready
	$(PY) -m pytest -n 2 --dist loadfile

test-all: .venv/ready
	$(PY) -m pytest -n 2 --dist loadfile -m ''

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/ready
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: .venv/ready
	@set -e; for file in tests/bench/bench_*.py; do name=$${file%.py}; echo; $(PY) -m $${name//\//.}; done

# torch goes first and alone: with it in place no other package can pull in a second build of it
.venv/ready: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; run make PYTHON=python3.12")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
