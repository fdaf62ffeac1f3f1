# Every target is self-contained: it makes .venv if there is none and installs what it needs, pinned in constraints.txt.
# A stamp per set of extras records what is installed; a newer pyproject.toml or constraints.txt installs again.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q -c constraints.txt

.PHONY: train test test-slow bench profile clean

train: $(VENV)/.installed-train
	$(BIN)/shardwise train

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/compare.py

profile: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/step_profile.py

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: it is the large one, and a build of anything else may ask for it.
$(VENV)/.installed-torch: constraints.txt | $(BIN)/python
	$(PIP) torch
	touch $@

$(VENV)/.installed-train: pyproject.toml constraints.txt $(VENV)/.installed-torch
	$(PIP) -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt $(VENV)/.installed-torch
	$(PIP) -e ".[dev,hf]"
	touch $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt $(VENV)/.installed-torch
	$(PIP) -e ".[dev,bench]"
	touch $@
