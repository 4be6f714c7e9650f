# Every target builds .venv by itself; the second time it is there.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: reproduce test lint types layers pytest test-ecosystem test-distributed test-oldest sanitize bench errata docs sdist wheel wheel-aarch64 clean

reproduce: .venv/experiments.stamp  ## the paper's experiments, with a report in results/
	$(BIN)/ortholand reproduce --preset quick --out results

test: lint types layers pytest  ## everything that must pass before a commit

errata: .venv/experiments.stamp  ## the paper's corrected statements, measured
	$(BIN)/ortholand errata

docs: .venv/docs.stamp  ## the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

layers: .venv/dev.stamp
	$(BIN)/lint-imports

pytest: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2

test-ecosystem: .venv/ecosystem.stamp  ## in Lightning, Accelerate, the Trainer and Hydra
	$(BIN)/python -m pytest -m ecosystem tests/ecosystem

test-distributed: .venv/dev.stamp  ## all sharded tests, minutes
	$(BIN)/python -m pytest -m "distributed or slow_distributed" tests/distributed tests/lab/benchmarks/test_sharded.py

# Several gigabytes the first time: torch's wheels of that age bring CUDA. Nothing sharded: its FSDP2
# does not run on CPUs. ARGS: more for pytest.
test-oldest: .venv-oldest/stamp  ## the oldest versions that pyproject.toml allows, in .venv-oldest
	.venv-oldest/bin/python -m pytest -n 2 \
		-m "not distributed and not slow_distributed and not docs and not ecosystem" $(ARGS)

# The sanitizers' library must be the first in the process, and libstdc++ there from the start;
# Python's own allocator would hide what lies beyond an array. ARGS: more for pytest.
sanitize: .venv/dev.stamp  ## compiled code under AddressSanitizer and UndefinedBehaviorSanitizer
	ORTHOLAND_SANITIZE=1 CXX=$(CXX) PYTHONMALLOC=malloc \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest --capture=no $(ARGS) tests/native/test_sanitized.py

bench: .venv/benchmarks.stamp  ## timings against peers, in results/
	$(BIN)/ortholand bench

sdist: build/tools/bin/hatchling  ## the source distribution in dist/, with all that its pages name
	rm -f dist/ortholand-*.tar.gz
	build/tools/bin/hatchling build -t sdist -d dist
	build/tools/bin/python tools/check_sdist.py dist/ortholand-*.tar.gz

# By hatchling itself: pip would compile everything twice. Tested where nothing but the wheel and
# torch is installed, and no compiler is found.
# Torch's headers are those of .venv.
TORCH = ORTHOLAND_TORCH="$$($(BIN)/python -c 'import torch; print(*torch.__path__)')"
wheel: build/tools/bin/hatchling .venv/dev.stamp  ## a wheel with compiled code in dist/, tested in an empty environment
	rm -rf build/wheel dist/ortholand-*-py3-none-*linux*_$$(uname -m).whl
	$(TORCH) ORTHOLAND_PREBUILT=1 build/tools/bin/hatchling build -t wheel -d dist
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		dist/ortholand-*-py3-none-*linux*_$$(uname -m).whl
	cd build/wheel && bin/python -I ../../tools/check_wheel.py

# Needs g++-aarch64-linux-gnu, and qemu-user for its test.
wheel-aarch64: build/tools/bin/hatchling .venv/dev.stamp  ## the same for aarch64, by a cross compiler
	rm -f dist/ortholand-*-py3-none-*linux*_aarch64.whl
	$(TORCH) ORTHOLAND_PREBUILT=aarch64 build/tools/bin/hatchling build -t wheel -d dist

build/tools/bin/hatchling:
	$(PYTHON) -m venv build/tools
	build/tools/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling

# One environment for all; what a target does not need is not installed for it.
.venv/%.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing ortholand[$*] in .venv (a minute or two the first time) ..."
	$(PIP) --editable ".[$*]"
	@touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv-oldest/stamp: pyproject.toml constraints-oldest.txt
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-oldest.txt --editable ".[experiments]" \
		geoopt hypothesis pymanopt pytest pytest-xdist python-picard
	@touch $@

clean:
	rm -rf .venv .venv-oldest build dist results .pytest_cache .ruff_cache .hypothesis .import_linter_cache
