# Every target builds .venv by itself; the second time it is there.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: reproduce test test-lab test-all lint types layers pytest test-thorough test-ecosystem test-distributed test-oldest sanitize bench errata docs sdist wheel wheel-aarch64 clean

reproduce: .venv/lab.stamp  ## the paper's experiments, with a report in results/
	$(BIN)/ortholand reproduce --preset quick --out results

test: lint types layers pytest  ## what must pass before a commit: minutes

test-thorough: .venv/dev.stamp  ## the library's tests that the core leaves out
	$(BIN)/python -m pytest -n 2 -m "(thorough or hypothesis) and not ($(APART))" $(LIBRARY)

test-lab: .venv/dev.stamp  ## the laboratory, its doctests and the examples
	$(BIN)/python -m pytest -n 2 tests/lab tests/examples lab/src

test-all: test test-thorough test-lab sanitize docs  ## everything but what needs training stacks or old versions
	$(BIN)/python -m pytest -m "slow_distributed or docs" $(SHARDED) tests/test_site.py

errata: .venv/lab.stamp  ## the paper's corrected statements, measured
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

APART = docs or ecosystem or slow_distributed
LIBRARY = --ignore tests/lab --ignore tests/examples tests src
pytest: .venv/dev.stamp
	HYPOTHESIS_PROFILE=core $(BIN)/python -m pytest -n 2 -m "not (thorough or $(APART))" $(LIBRARY)

# timm without torchvision: PyPI's is compiled for CUDA, and beside another build of torch it keeps
# transformers, too, from being imported.
test-ecosystem: .venv/ecosystem.stamp  ## in frameworks, and in hubs that take an optimizer's name
	$(PIP) --no-deps timm
	$(BIN)/python -m pytest -m ecosystem tests/ecosystem

SHARDED = tests/distributed tests/lab/benchmarks/test_sharded.py
test-distributed: .venv/dev.stamp  ## all sharded tests, minutes
	$(BIN)/python -m pytest -m "distributed or slow_distributed" $(SHARDED)

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
.venv/lab.stamp: PACKAGES = . ./lab
.venv/benchmarks.stamp: PACKAGES = . ./lab[benchmarks]
.venv/dev.stamp: PACKAGES = .[dev] ./lab
.venv/ecosystem.stamp: PACKAGES = .[ecosystem] ./lab
.venv/docs.stamp: PACKAGES = .[docs]
.venv/%.stamp: pyproject.toml lab/pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing $(PACKAGES) in .venv (a minute or two the first time) ..."
	$(PIP) $(PACKAGES:%=--editable "%")
	@touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv-oldest/stamp: pyproject.toml lab/pyproject.toml constraints-oldest.txt
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-oldest.txt --editable . --editable ./lab \
		geoopt hypothesis pymanopt pytest pytest-xdist python-picard
	@touch $@

clean:
	rm -rf .venv .venv-oldest build dist results .pytest_cache .ruff_cache .hypothesis .import_linter_cache
