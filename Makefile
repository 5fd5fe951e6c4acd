# `make demo` and `make test` need only Python 3.11+ and make: both build .venv first.
PYTHON ?= $(shell command -v python3.13 || command -v python3.12 || command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: demo test test-oldest check format peers bench clean

.venv/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: .venv/.installed
	$(BIN)/python demos/mnist_logistic.py --out out/mnist_logistic

test: .venv/.installed
	$(BIN)/python -m pytest

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The oldest JAX that pyproject.toml admits.
test-oldest:
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --editable '.[test]' jax==0.9.0 jaxlib==0.9.0
	.venv-oldest/bin/python -m pytest

# TFP, NumPyro and BlackJAX, which the benchmarks compare with; no dependency of ours.
peers:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --requirement benchmarks/peers-requirements.txt

bench: .venv/.installed peers
	$(BIN)/python -m benchmarks mnist --out out/benchmark_mnist.json

clean:
	rm -rf .venv .venv-peers .venv-oldest out build *.egg-info
