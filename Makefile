# Two commands do everything on a machine with Python 3.10+ and make:
#   make demo   installs into .venv and trains, evaluates and draws on images that come with the package
#   make test   installs into .venv and runs the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types docs check benchmarks results soak clean

# The stamp is newer than pyproject.toml once everything it lists is installed.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || (echo "snclr needs Python 3.10 or newer; this is $$($(PYTHON) --version). Give another: make PYTHON=python3.11 ..." && exit 1)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/snclr demo

# One process more than there are cores: many tests wait, for a signal or a timeout.
test: $(VENV)/.installed
	PYTEST_XDIST_AUTO_NUM_WORKERS=$$(($$(getconf _NPROCESSORS_ONLN) + 1)) $(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# Builds the documentation site into site/; a broken link or reference is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint types docs test

benchmarks: $(VENV)/.installed
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/data.py

# Rebuilds the tables and figures in docs/results from the records in results/.
results: $(VENV)/.installed
	$(BIN)/python scripts/build_results.py
	$(BIN)/python scripts/build_results.py --page docs/results/all-methods.md
	$(BIN)/python scripts/neighbor_tables.py

# Every promise of docs/reliability.md at its full number of trials; takes about an hour on two cores.
soak: $(VENV)/.installed
	$(BIN)/python scripts/soak.py

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
