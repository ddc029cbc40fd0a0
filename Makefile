# Two commands on a fresh machine: `make demo` and `make test`. Everything stays in this folder.
#   make demo ARGS='train.epochs=2 model=hf model.path=/models/qwen'
#   make setup PROFILE=cuda
#   make test ARGS='-k gather'
SHELL := /bin/bash
VENV ?= .venv
ARGS ?=
export VENV
PY := $(VENV)/bin/python
# Three at a time on two cores, since many tests wait; which stay together, tests/conftest.py says.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help setup setup-lm-eval setup-smollm2 setup-dev demo demo-real test test-all test-gpu test-gpus check docs \
  format bench-weights bench-training bench-rl bench-gpu lock up deploy down status

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup:  ## the environment, from the lock (PROFILE=cpu|cuda)
	@infra/setup.sh

setup-lm-eval:  ## the environment, and lm-evaluation-harness (eval.lm_eval)
	@infra/setup.sh lm-eval

setup-smollm2:  ## the environment, and the real model of the demo (93 MB)
	@infra/setup.sh smollm2

setup-dev:  ## the environment with the test tools
	@infra/setup.sh dev

demo: setup  ## the main job on the embedded default (ARGS: Hydra overrides)
	$(PY) flows/rlhf.py +exp=qlora $(ARGS)

demo-real: setup-smollm2  ## SmolLM2-135M learns to answer in JSON (ARGS: Hydra overrides)
	$(PY) flows/rlhf.py +exp=smollm2/sft $(ARGS)

test: setup-dev  ## the default suite (ARGS: pytest arguments)
	@TIMEFORMAT='make test: %0R s, of CPU %0U s and %0S s in the kernel'; \
	  time $(PY) -m pytest $(WORKERS) $(ARGS)

test-all: setup-dev setup-smollm2  ## the default suite, and what is marked slow or peers
	@TIMEFORMAT='make test-all: %0R s, of CPU %0U s and %0S s in the kernel'; \
	  time $(PY) -m pytest $(WORKERS) -m '' $(ARGS)

test-gpu: setup-dev  ## everything that needs a GPU, on one, in 25 minutes (ARGS='-k fork': a part)
	$(PY) -m pytest tests/gpu -m gpu -rP --durations=0 $(ARGS)

test-gpus: setup-dev  ## what needs two GPUs or more
	$(PY) -m pytest tests/gpu -m gpus -rP --durations=0 $(ARGS)

check: setup-dev  ## lint, format, types, import rules, documentation
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m infra.docs.run_blocks
	@$(MAKE) --no-print-directory docs

docs: setup-dev  ## the documentation as a site in build/site, every link checked
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet -f infra/docs/mkdocs.yml

format: setup-dev  ## format and fix what can be fixed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench-weights: setup-dev  ## merge, gather and plans beside their peers (ARGS: rows, --sizes, --runs)
	$(PY) -m benchmarks.weights $(ARGS)

bench-training: setup-dev setup-smollm2  ## training beside TRL and a bare loop (ARGS: rows, --runs, --dtype)
	$(PY) -m benchmarks.training $(ARGS)

bench-rl: setup-dev  ## online learning beside transformers and TRL (ARGS: rows, --runs, --size)
	$(PY) -m benchmarks.rl $(ARGS)

bench-gpu: setup-dev  ## all of these on one GPU, into docs/benchmarks.md (ARGS: rows, --runs)
	$(PY) -m benchmarks.gpu $(ARGS)

lock:  ## make requirements/*.lock of the pins in pyproject.toml (ARGS: only these)
	@requirements/lock.sh $(ARGS)

up: setup  ## Prefect server, MLflow server and a worker on loopback (PREFECT_PORT, MLFLOW_PORT)
	@$(PY) -m infra.services up

deploy: setup  ## register the deployments of infra/prefect.yaml
	@$(PY) -m infra.services deploy

down: setup  ## stop what `make up` started
	@$(PY) -m infra.services down

status: setup  ## what runs, and where
	@$(PY) -m infra.services status
