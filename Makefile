# Two commands set everything up: `make demo` runs the whole chain, `make test` passes the tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# An install is repeated only when what it depends on has changed.
STAMP := .venv/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

export HF_HUB_OFFLINE ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1

.PHONY: demo demo-long test test-integration lint type bench install clean

demo: $(STAMP)
	$(BIN)/dflash-flow demo

demo-long: $(STAMP)
	$(BIN)/dflash-flow demo --long

test: $(STAMP)
	$(BIN)/python -m pytest -m "not integration"

test-integration: $(STAMP)
	$(BIN)/python -m pytest -m integration

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

type: $(STAMP)
	$(BIN)/pyright

bench: $(STAMP)
	for program in benchmarks/bench_*.py; do $(BIN)/python "$$program" || exit 1; done

install: $(STAMP)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "python3 is missing: install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old: install Python 3.11 or newer, or set PYTHON="; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "Python's venv module is missing: install it (Debian: python3-venv)"; exit 1; }
	@command -v git >/dev/null || { echo "git is missing: install git"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# The authors' decoder is an oracle in tests; its own pins of torch would clash with ours.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
	@rm -f .venv/.installed-*
	@touch $@

clean:
	rm -rf .venv runs
