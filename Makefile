PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup run test check parity
setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV): PyTorch and the rest, 2 GB with the CPU build, more with CUDA"
	@$(PYTHON) -m venv $(VENV) || (echo "no venv module: apt-get install python3-venv"; exit 1)
	$(BIN)/python -m pip install -q -U pip
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,peers,ltx]"
	touch $@

run: setup
	$(BIN)/python launch.py serve

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -q --durations=10

parity: setup # the goldens in the checkout; others: launch.py parity FOLDER
	$(BIN)/python -m tests.tiny_checkpoints
	$(BIN)/python launch.py parity tests/goldens
