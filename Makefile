# Everything here works in a virtual environment of its own, .venv, made on first use (`make environment` makes it and nothing else).
#
#   make demo    quantize, judge and reload a real 135M-parameter model (6 minutes on 2 cores)
#   make test    the test suite                  make lint    ruff
#   make types   mypy                            make docs    docs/cli.md from the commands' own --help
#   make thorough   hundreds of plans against runs on simulated devices (20 minutes on 2 cores)
#   make accuracy   KL of every scheme against auto-round's, several seeds (two hours on 2 cores)
#   make bench   seconds of one tuning step      make peers   comparisons with auto-round, in its own environment (.venv-peers)
#
# PYTHON=python3.12 picks the interpreter, VENV=DIR the environment, TORCH='torch==2.13.0+cpu' another build of torch, JOBS=1 the
# number of test processes.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
BIN := $(VENV)/bin
# Test processes share the cores: one thread each.
ONE_THREAD := OMP_NUM_THREADS=1

PEERS := .venv-peers

.PHONY: environment demo test thorough lint types docs docs-check bench accuracy peers peers-goldens clean

environment: $(VENV)/made

# torch first and by itself, so that no other package picks a build of it.
$(VENV)/made: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,gguf]'
	touch $@

$(PEERS)/made: tools/peers/make_env.sh
	tools/peers/make_env.sh $(PEERS) $(PYTHON)
	touch $@

demo: $(VENV)/made
	TQDM_DISABLE=1 $(BIN)/python tools/demo.py

test: $(VENV)/made
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(JOBS)

thorough: $(VENV)/made
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(JOBS) -m thorough

lint: $(VENV)/made
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/made
	$(BIN)/python -m mypy

docs: $(VENV)/made
	$(BIN)/python tools/cli_docs.py

docs-check: $(VENV)/made
	$(BIN)/python tools/cli_docs.py --check

bench: $(VENV)/made
	$(BIN)/python tools/bench.py src/evenround/data/tiny-llama $(wildcard models/SmolLM2-135M-Instruct)

peers: $(VENV)/made $(PEERS)/made
	$(BIN)/python tools/peers/compare.py --peer $(PEERS)/bin/python

accuracy: $(VENV)/made $(PEERS)/made
	$(ONE_THREAD) $(BIN)/python tools/peers/accuracy.py --peer $(PEERS)/bin/python

# auto-round's rounding again, against the hashes that the tests use.
peers-goldens: $(VENV)/made $(PEERS)/made
	$(PEERS)/bin/python tools/peers/float_goldens.py tests/golden/autoround_float_rtn.json --check
	$(PEERS)/bin/python tools/peers/rtn_goldens.py src/evenround/data/tiny-llama tests/golden/autoround_rtn.json --check

clean:
	rm -rf $(VENV) $(PEERS) build dist demo_out peers_out accuracy_out .mypy_cache .pytest_cache .ruff_cache .hypothesis
