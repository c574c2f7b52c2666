# `make chat` and `make test` work on a fresh machine; the rest are for people who change the code.
# A target sets up what it needs, in .venv or .venv-test, and reuses it until pyproject.toml or constraints.txt change.
#
#   make chat ASK="What is the capital of France?"     one answer
#   make chat MODEL=/path/to/model ARGS="--dtype fp32"  another model, any options
#   make serve ARGS="--port 8001"
#   make PYTHON=python3.12 test                         another Python

PYTHON ?= python3
MODEL  ?= smollm2-135m
ARGS   ?=
ASK    ?=
export ASK

RUN  := .venv/bin/
TEST := .venv-test/bin/

# One thread each: tests run beside other work, and their tensors are small.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help chat serve bench doctor test check unit rest wheel gpu sizes tour docs clean .venv .venv-test

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | \
	  awk -F '\t' '{ printf "  make %-11s %s\n", $$1, $$2 }'

.venv:
	@$(PYTHON) tools/environment.py .venv cpu

.venv-test:
	@$(PYTHON) tools/environment.py .venv-test cpu cuda lint test

chat: .venv     ## set up, then talk to the default model; ASK="..." answers once
	@unset OMP_NUM_THREADS; \
	if [ -n "$$ASK" ]; then $(RUN)tokamak chat "$(MODEL)" --ask "$$ASK" $(ARGS); \
	else $(RUN)tokamak chat "$(MODEL)" $(ARGS); fi

serve: .venv    ## set up, then serve it on port 8000
	@unset OMP_NUM_THREADS; exec $(RUN)tokamak serve "$(MODEL)" $(ARGS)

bench: .venv    ## tokens a second of the default model in this process
	@unset OMP_NUM_THREADS; $(RUN)tokamak bench throughput "$(MODEL)" $(ARGS)

doctor: .venv   ## what this machine is, and what would be chosen on it
	@unset OMP_NUM_THREADS; $(RUN)tokamak doctor "$(MODEL)" $(ARGS)

test: .venv-test ## set up, then run everything a CPU can run
	@$(MAKE) --no-print-directory check rest wheel

check: .venv-test ## lint, types, layers, sizes, unit, tour, docs: about a minute
	$(TEST)ruff check .
	$(TEST)ruff format --check .
	$(TEST)basedpyright --pythonpath $(TEST)python
	$(TEST)lint-imports
	$(TEST)python tools/sizes.py --check
	$(TEST)python tools/tour.py
	$(TEST)python tools/reference_docs.py --check
	$(TEST)pytest -q tests/unit

unit: .venv-test ## the unit tests alone
	$(TEST)pytest -q tests/unit $(ARGS)

rest: .venv-test ## the CPU tests that `check` leaves out
	$(TEST)pytest -q -n auto --maxprocesses=8 --dist loadfile -m "not gpu and not multigpu" tests/reference tests/distributed tests/server tests/e2e

wheel: .venv-test ## the wheel in an empty environment, tried from another folder
	$(TEST)python tools/wheel.py

gpu:            ## device tests and benchmarks, with the python that is there; writes records
	$(PYTHON) -m pytest -q -p no:benchmark -p no:xdist -m "gpu or multigpu" tests/gpu
	$(PYTHON) -m benchmarks.engine.offline --record h200-offline
	$(PYTHON) -m benchmarks.serving.gpu_serve --record h200-serve

sizes:          ## the longest files and functions
	@$(PYTHON) tools/sizes.py

tour:           ## every function docs/tour.md names exists
	@$(PYTHON) tools/tour.py

docs: .venv-test ## write the reference pages anew
	@$(TEST)python tools/reference_docs.py

clean:          ## remove environments and caches; fetched models stay
	rm -rf .venv .venv-test dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
