# `make demo` and `make test` do all set-up themselves; nothing else is needed on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
VENV := .venv/pyvenv.cfg
READY := .venv/.ready
CORE := .venv/.core
LARGE := .venv/.large
# One more than the two cores of CI: tests wait for processes much of the time, and meanwhile another worker computes.
WORKERS ?= 3
# Modules are compiled when they are first imported, and kept: most that are installed never are.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint types docs kernels codec-kernels bytecode unit test-slow test-all test-package test-docs test-reach test-ray test-harness test-peft test-browser test-trackers test-data test-triton chaos bench \
	bench-train bench-serve gpu-bundle clean

demo: $(READY)
	$(BIN)/python examples/lose_half.py
	@echo
	$(BIN)/skippipe compare published20 --contention-only --budget 3 -o demo --overwrite
	@echo
	$(BIN)/skippipe show demo/best.json --html demo/best.html --png demo/best.png --overwrite
	@echo
	$(BIN)/skippipe train examples/demo.toml --drill 12 --force
	@echo
	@echo "Open demo/best.html (interactive) or demo/best.png; demo/run/traces in ui.perfetto.dev."
	@echo "Let the built-in model write: .venv/bin/skippipe generate austen \"It is a truth\" --keep 1/2"

test:  # all at once: compiling kernels and the type checker have the core that pip or waiting tests leave idle
	$(MAKE) --no-print-directory -j 3 lint unit types docs

lint: $(CORE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo  # layers, and no circles: tool.importlinter in pyproject.toml

types: $(READY)
	$(BIN)/mypy

docs: $(READY)  # a link that leads nowhere, or a page that is not in the navigation, is an error; --quiet would hide them
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

kernels: $(CORE)  # compiled once and kept: or timed tests would wait, and several processes compile the same
	$(BIN)/python -m tests.compile_kernels

codec-kernels: $(READY)
	$(BIN)/python -m tests.compile_kernels codecs

bytecode: $(READY)  # of tests and all they import: or every worker would compile it for itself at the same time
	$(BIN)/pytest --collect-only -qq > /dev/null

# A test that fails is tried again alone: on two cores that others use, too, a wait of a test with sockets or processes may
# run out beside other workers. What fails twice is an error; what failed once is named above it.
unit: kernels codec-kernels bytecode
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" \
		|| { [ $$? -eq 1 ] && $(BIN)/pytest --last-failed --last-failed-no-failures none -m "not slow"; }

test-slow: $(READY) kernels  # what takes many seconds each: long random searches, more fault plans
	$(BIN)/pytest -n 2 --dist load -m slow

test-package: $(READY)
	$(BIN)/pytest tests/long/package.py

test-docs: $(READY)  # Linux, with iproute2 and curl: machines of its own, which need no root this way
	unshare --map-root-user $(BIN)/pytest tests/long/docs_walkthrough.py

test-reach: $(READY)  # Linux, with iproute2: networks of its own, with a home router
	unshare --map-root-user $(BIN)/pytest tests/long/reach.py

test-all:  # all of them; says what it could not run, and why
	$(PYTHON) -m tests.run_all

test-ray: $(READY) kernels  # Linux, with iproute2: in a network that has the loopback only, or Ray looks for an address outside
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	unshare --map-root-user --net sh -c 'ip link set lo up && exec $(BIN)/pytest tests/long/ray_launch.py'

test-harness: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,harness]' accelerate  # the harness's own model wants it
	$(BIN)/pytest tests/long/lm_harness.py

test-peft: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' peft
	$(BIN)/pytest tests/long/peft_training.py

test-browser: $(READY) kernels  # with Debian's chromium: apt-get install chromium
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,browser]'
	$(BIN)/pytest tests/long/browser.py

test-trackers: $(READY)  # W&B and MLflow themselves, without a network
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,wandb,mlflow]'
	$(BIN)/pytest tests/long/trackers.py

test-data: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,parquet,datasets]'
	$(BIN)/pytest tests/long/data_libraries.py

test-triton: $(READY)  # kernels for a GPU: computed by Triton's interpreter, and compiled; no GPU is needed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt triton
	TRITON_INTERPRET=1 $(BIN)/pytest tests/long/triton_kernels.py
	$(BIN)/pytest tests/long/triton_compilation.py

chaos: $(READY)
	$(BIN)/python -m benchmarks.fuzz
	$(BIN)/python -m benchmarks.fuzz_admission
	$(BIN)/python -m benchmarks.fuzz_relay
	$(BIN)/python -m benchmarks.chaos virtual
	$(BIN)/python -m benchmarks.chaos processes
	$(BIN)/python -m benchmarks.chaos recovery
	$(BIN)/python -m benchmarks.chaos long

bench: $(READY)
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.planner
	$(BIN)/python -m benchmarks.best
	$(BIN)/python -m benchmarks.published
	$(BIN)/python -m benchmarks.repair

bench-train: $(READY)
	$(BIN)/python -m benchmarks.exact
	$(BIN)/python -m benchmarks.promised --time 0.04
	$(BIN)/python -m benchmarks.local
	$(BIN)/python -m benchmarks.transport

bench-serve: $(READY)
	$(BIN)/python -m benchmarks.serving

gpu-bundle: $(READY)  # for a GPU machine without a package index: what it lacks, in a folder to carry along
	$(BIN)/python -m benchmarks.gpu_bundle

$(READY): $(CORE) $(LARGE) pyproject.toml
	$(PIP) -e '.[dev]'
	@touch $@

$(CORE): $(VENV) constraints.txt  # what the linters and the kernels need: these run while all the rest is installed
	$(PIP) import-linter numba ruff scipy
	@touch $@

$(LARGE): $(VENV) constraints.txt  # installed beside that, since pip keeps one core busy: nothing of the above needs them
	$(PIP) --no-deps torch transformers sympy plotly mkdocs-material tensorboard grpcio
	@touch $@

$(VENV):
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv demo build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
