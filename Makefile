# Every target sets up what it needs: uv (found or bootstrapped), the locked environment, buf.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

UV := $(shell command -v uv 2>/dev/null || echo .tools/uv/bin/uv)
BUF := .tools/buf/node_modules/.bin/buf
BUF_VERSION := 1.75.0
AXE := .tools/axe/node_modules/axe-core/axe.min.js
AXE_VERSION := 4.14.1
RUN := $(UV) run --frozen --no-sync

# Engine of the demo: embedded, or vllm.
ENGINE ?= embedded

# Unit tests compute: one worker a core. With the others, which start programs and wait for them: two workers a core, or
# one worker more from three cores on, since each takes two GB with its programs.
# WORKERS=0 runs them one at a time, on a machine that has little memory or other work to do.
CORES := $(shell getconf _NPROCESSORS_ONLN)
UNIT_WORKERS ?= $(shell echo $$(($(CORES) < 4 ? $(CORES) : 4)))
WORKERS ?= $(shell echo $$(($(UNIT_WORKERS) < 3 ? 2 * $(UNIT_WORKERS) : $(UNIT_WORKERS) + 1)))
UNIT := tests/unit tests/property tests/golden
test unit: export PYTHONDONTWRITEBYTECODE = # what tests and their programs import is compiled once

.PHONY: help setup vllm demo demo-runs test unit check lint format types layers contracts drift bench wheels proto archive clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.tools/uv/bin/uv:
	python3 -m venv .tools/uv
	.tools/uv/bin/pip install --quiet uv

$(BUF):
	@command -v npm >/dev/null || { echo "buf comes from npm: install Node.js 18 or later, then run make again" >&2; exit 2; }
	npm install --silent --no-audit --no-fund --prefix .tools/buf @bufbuild/buf@$(BUF_VERSION)

$(AXE): # the accessibility of the page of `meshrl ui`
	npm install --silent --no-audit --no-fund --prefix .tools/axe axe-core@$(AXE_VERSION)

setup: $(filter .tools/%,$(UV)) ## Create .venv from the lock file
	$(UV) sync --frozen --quiet --all-groups --compile-bytecode

vllm: setup ## Create .tools/vllm, vLLM for the CPU (Linux; a few minutes, once)
	UV=$(UV) scripts/install_vllm.sh

demo: setup $(if $(filter vllm,$(ENGINE)),vllm) ## Train a small model to reverse text on the CPU, end to end (ENGINE=vllm: with vLLM)
	$(RUN) python -m meshrl.launch.demo --engine $(ENGINE) $(ARGS)

demo-runs: setup ## Train three adapters of a small model beside each other in one mesh, on the CPU
	$(RUN) python -m meshrl.launch.demo --runs $(ARGS)

test: setup vllm $(BUF) $(AXE) ## Run every test that needs no GPU
	$(RUN) pytest -m "not gpu" --numprocesses $(WORKERS) $(ARGS)

unit: setup ## Run the tests that start no processes
	$(RUN) pytest $(UNIT) --numprocesses $(UNIT_WORKERS) $(ARGS)

check: lint types layers contracts drift test ## Everything that must be green before a commit

lint: setup
	$(RUN) ruff format --check .
	$(RUN) ruff check .

format: setup ## Rewrite the code in the house format
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

types: setup
	$(RUN) mypy

layers: setup
	$(RUN) lint-imports

contracts: $(BUF)
	$(BUF) lint
	scripts/check_contracts.sh

drift: setup
	UV=$(UV) scripts/check_stubs.sh

wheels: setup ## Build the distributions, install them in an empty environment and make a short run there (two minutes)
	UV=$(UV) scripts/check_wheels.sh

proto: setup ## Regenerate clients/python/meshrl/v1 from proto/
	UV=$(UV) scripts/generate_stubs.sh

archive: setup ## Pack protos, vectors and docs/contract.md as outputs/meshrl-contract-VERSION.tar.gz
	$(RUN) python scripts/archive_contract.py

# Those that need neither a GPU, nor TRL, nor root, nor an hour.
BENCHMARKS := deltas engine hub hub_bytes ledger rollouts tokens ui weight_sync workers

bench: setup ## Print the benchmark tables that two cores make; the others are in tests/benchmarks
	for name in $(BENCHMARKS); do $(RUN) python tests/benchmarks/bench_$$name.py; done

clean: ## Remove what the targets made
	rm -rf .venv .tools outputs .mypy_cache .ruff_cache .pytest_cache .hypothesis
