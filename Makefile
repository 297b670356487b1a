# Thin: each target is a line or two that a person could type.
#   make up                    the whole product on this machine, at http://127.0.0.1:8000
#   make up NODES=12 PORT=9000 INGEST_PORT=9001 with more simulated nodes, on other ports

NODES ?= 8
PORT ?= 8000
INGEST_PORT ?= 8001

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell \
	command -v $(name) >/dev/null 2>&1 && \
	$(name) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	echo $(name))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# Says what is being fetched, not all that has been considered.
BRIEFLY := | sed -u -n -e 's/^Installing collected.*/  installing/p' -e '/^ *Downloading /p'
SHELL := /bin/bash -o pipefail

.PHONY: install up down reset test test-parts test-processes soak lint bench

install: .venv/installed

up: install
	@exec $(BIN)/python manage.py up --nodes $(NODES) --port $(PORT) --ingest-port $(INGEST_PORT)

down:
	@$(BIN)/python manage.py down

reset:
	@$(BIN)/python manage.py reset

# What starts products, agents and training jobs waits for leases and reboots most of the time, the
# rest computes: side by side, each with its own PostgreSQL and Redis. What they say comes in turn.
test: lint
	$(BIN)/python manage.py makemigrations --check --dry-run
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target test-processes test-parts

# Of the runtime's tests those that make the two halves equally long.
BESIDE := $(addprefix tests/runtime/test_,membership.py divided.py data_fleets.py resume.py \
	torture_storage.py)

test-parts: .venv/installed-dev
	$(BIN)/python -m pytest -m "not e2e" --ignore=tests/runtime
	$(BIN)/python -m pytest $(BESIDE) -m "not soak"

# Named, since collecting all tests to choose a few of them takes half a minute.
END_TO_END = $(shell grep -rlF --include='test_*.py' mark.e2e tests)

test-processes: .venv/installed-dev
	$(BIN)/python -m pytest -m e2e $(END_TO_END)
	$(BIN)/python -m pytest tests/runtime $(addprefix --ignore=,$(BESIDE)) -m "not soak"

# Replicas that die in every way in every phase: for an hour and a half, so before a release and
# after a change to how replicas come and go.
soak: .venv/installed-dev
	$(BIN)/python -m pytest tests/runtime -m soak

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/lint-imports

# All of them, whatever becomes of one; 77 is said by what is left out, since no product runs.
bench: .venv/installed-dev
	@failed=; for file in benchmarks/*.py; do $(BIN)/python "$$file"; case $$? in \
		0|77) ;; *) failed="$$failed $$file";; esac; done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# --- environment ----------------------------------------------------------------------------------

# Made last: an environment whose making was cut short is completed.
.venv/bin/pip:
	@test -n "$(PYTHON)" || { echo "Drydock needs Python 3.11 or later with its venv module:" \
		"install it (Debian: apt install python3-venv), or name it: make up PYTHON=/path" >&2; exit 1; }
	@echo "making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

.venv/installed: requirements.lock | .venv/bin/pip
	@echo "installing packages into .venv: some minutes the first time, torch is the largest"
	@$(PIP) -r requirements.lock $(BRIEFLY)
	@touch $@

.venv/installed-dev: requirements-dev.lock .venv/installed
	@echo "installing development tools into .venv"
	@$(PIP) -r requirements-dev.lock $(BRIEFLY)
	@touch $@
