# make demo   install, then train a 4-hospital phantom federation three ways and write a page about it
# make quick  linters, contract table, closed forms, one small run from end to end: under 90 s on two cores
# make test   everything that a change needs, linters included
# make release-check  the documentation as a site, its notebooks, the wheel
# make soak   the long tests, all fault schedules, 200 kills, fuzzing, the digests of all results, every benchmark
# make check  the linters alone; make format lets ruff mend what it can
# make docs   the documentation as a site in build/site, without a network; warnings are errors

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo quick test tests doctests release-check soak check style types layers format docs bench clean

demo: $(READY)
	$(BIN)/polysite demo

quick: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not soak" tests/algorithms/test_contract.py \
	  tests/algorithms/test_closed_form*.py tests/test_quick.py

test: $(READY)
	$(MAKE) --no-print-directory -j 2 style types layers doctests
	$(MAKE) --no-print-directory tests

# few workers: each imports torch, and builds the fixtures that tests share
tests: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not soak and not release"

doctests: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --doctest-modules src

release-check: docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 -m "release and not soak"

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m soak
	$(BIN)/python scripts/faults.py --schedules 20 --seed 0
	$(BIN)/python scripts/flare_faults.py
	$(BIN)/python scripts/kills.py --kills 200 --seed 0
	$(BIN)/python scripts/fuzz.py --inputs 10000 --seed 0
	$(BIN)/python scripts/digests.py --compare scripts/digests.json
	$(MAKE) bench

check: $(READY)
	$(MAKE) --no-print-directory -j 2 style types layers

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/lock.py --check
	$(BIN)/python scripts/size.py --check

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(READY)
	$(BIN)/python bench/aggregate.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/loading.py
	$(BIN)/python bench/hd95.py
	$(BIN)/python bench/radiomics.py
	$(BIN)/python bench/emd.py
	$(BIN)/python bench/assess.py planted
	$(BIN)/python bench/demo.py

# torch first and by itself, so that the pinned build is taken and nothing pulls another
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "polysite needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
