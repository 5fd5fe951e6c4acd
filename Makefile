# `make demo` and `make test` need only Python 3.11+ and make: both build .venv first.
# The first of these that runs and is new enough: a name on the PATH may be a stub that does neither.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# A file's tests share a process; files in the order of tests/conftest.py.
TWO_PROCESSES := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-oldest test-oldest-quick chips chips-quick margins mutations check format peers bench validate clean

.venv/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: .venv/.installed
	$(BIN)/python demos/mnist_logistic.py --out out/mnist_logistic

test: .venv/.installed
	$(BIN)/python -m pytest $(TWO_PROCESSES)

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The oldest JAX that pyproject.toml admits. CI runs what leans on JAX most: how arrays lie, print and are
# read back from programs, and how functions are known by what they mean.
QUICK := jax_private imports chunkwise versions placement abstract_mesh positional device_groups visualize visualize_leaves hlo meaning mapped_axes

.venv-oldest/.installed: pyproject.toml
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --editable '.[test]' jax==0.9.0 jaxlib==0.9.0
	touch $@

test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest $(TWO_PROCESSES)

test-oldest-quick: .venv-oldest/.installed
	@ls $(QUICK:%=tests/test_%.py) > /dev/null  # a file that was renamed is named; pytest -n would say nothing
	.venv-oldest/bin/python -m pytest $(TWO_PROCESSES) $(QUICK:%=tests/test_%.py)

# What the compilers of TPUs and GPUs make of our programs: they are installed here, and no chip is needed.
.venv-chips/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	test -x .venv-chips/bin/python || $(PYTHON) -m venv .venv-chips
	.venv-chips/bin/python -m pip install --quiet --editable '.[test,tpu,cuda]' jax==0.10.2 jaxlib==0.10.2
	touch $@

chips: .venv-chips/.installed
	.venv-chips/bin/python -m pytest $(TWO_PROCESSES) tests/chips

# A step of each model on each kind of chip, and what must be found wrong.
chips-quick: .venv-chips/.installed
	.venv-chips/bin/python -m pytest -n 2 -m quick tests/chips

# TFP, NumPyro and BlackJAX, which the benchmarks compare with; no dependency of ours.
peers:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --requirement benchmarks/peers-requirements.txt

bench: .venv/.installed peers
	$(BIN)/python -m benchmarks mnist --out out/benchmark_mnist.json
	$(BIN)/python -m benchmarks movielens --out out/benchmark_movielens.json

# How far statistical tests end from their bounds over 30 seeds: takes hours, so name files to tests.margins.
margins: .venv/.installed
	$(BIN)/python -m tests.margins --seeds 30

# Which test catches which fault of tests/mutations.txt: slow. Run again, it skips what it has caught in out/;
# python -m tests.mutations --only WORD takes some, and --check only looks them up.
mutations: .venv/.installed
	$(BIN)/python -m tests.mutations --jobs 2 --out out/mutations.jsonl

# Every kernel x mesh x number of chains against reference posteriors; validation/RESULTS.md is the last run.
validate: .venv/.installed
	$(BIN)/python -m validation --out out/validate.json

clean:
	rm -rf .venv .venv-peers .venv-oldest .venv-chips out build *.egg-info
