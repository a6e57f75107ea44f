# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := .ci/cpu.lock
READY  := $(VENV)/.ready

.PHONY: quickstart laptop test test-slow lint lock clean

quickstart: $(READY)
	@$(BIN)/lightning-ray train jobs/quickstart.yaml

# SmolLM2-135M on the quickstart's tasks: under an hour on two cores.
laptop: $(READY)
	@$(BIN)/python jobs/fetch_smollm2.py
	@$(BIN)/lightning-ray train jobs/swe_laptop.yaml

test: $(READY)
	@$(BIN)/ruff check lightning_ray jobs tests benchmarks
	@$(BIN)/python -m pytest

# What takes minutes or installs programs: every harness, recipe and architecture, or a part: TESTS=tests/harnesses
test-slow: $(READY)
	@$(BIN)/python -m pytest -m "slow and not gpu" $(TESTS)

lint: $(READY)
	@$(BIN)/ruff check lightning_ray jobs tests benchmarks

# A complete set of pinned versions for the CPU, installed without the resolver (it would add packages that break here).
$(READY): $(LOCK) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing. Install Python 3.11, or give another with PYTHON=..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (about 3 minutes, once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@echo "compiling DeepSpeed's CPU optimizer (once for each machine)"
	@$(BIN)/python -m lightning_ray.learner.optimizer
	@touch $@

# Resolves pyproject.toml anew. `.ci/overrides.txt` says what is left out, and why.
lock:
	@python3 -m venv build/lock && build/lock/bin/pip install --quiet uv
	@build/lock/bin/uv pip compile --quiet --no-header --no-annotate --python $(PYTHON) --override .ci/overrides.txt \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) --extra cpu --extra dev pyproject.toml -o $(LOCK)
	@sed -i 's/^\(torch==[0-9.]*\)+cpu/\1/' $(LOCK)

clean:
	rm -rf $(VENV) build *.egg-info
