# Everything runs in .venv, which these targets make themselves: a Python of 3.11 or newer and make are enough.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
ZOO := .venv/zoo/.installed
BESIDE := .venv/beside/.installed
TORCHES ?= 2.11 2.12 2.13 2.14 2.15
COMPAT ?= .compat
DOCS := build/docs

.PHONY: plans test lint docs suites reference bench soak gpu compat zoo dist clean

plans: $(READY)  ## check every plan in fixtures/plans
	$(BIN)/pytest --fxbucket-plans=fixtures/plans -n 2
	$(BIN)/pytest --fxbucket-plans=fixtures/plans/timed.toml  # step time, which workers beside it would change

test: $(READY)  ## lint, types, docs and all suites
	$(MAKE) --jobs 2 --output-sync lint docs $(ZOO) $(BESIDE)  # mypy keeps one core busy, and has nothing for a second
	$(MAKE) suites

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache  # layers, and no circles: pyproject.toml

docs: $(READY)  ## the pages of docs/, where a warning is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --fresh-env --builder html docs $(DOCS)

# Tests start many processes: each would compile the package anew where a setting of the machine forbids bytecode.
suites: $(READY) $(ZOO) $(BESIDE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest suites -n 2 -q --durations 20

reference: $(READY)  ## the table of docs/reference/plan.md, from the schema
	$(BIN)/python -m suites.plans.plan_reference

bench: $(READY)  ## the figures that docs/figures.md quotes
	$(BIN)/python suites/benchmarks/main_path.py
	$(BIN)/python -m suites.benchmarks.ranks
	$(BIN)/python -m suites.benchmarks.passes
	$(BIN)/python -m suites.benchmarks.pack_forms
	$(BIN)/python -m suites.benchmarks.goldens
	$(BIN)/python -m suites.benchmarks.capture
	$(BIN)/python -m suites.benchmarks.simulator
	$(BIN)/python -m suites.benchmarks.tune
	$(BIN)/python -m suites.benchmarks.stages
	$(BIN)/python -m suites.benchmarks.step_time
	$(BIN)/python -m suites.benchmarks.next_iteration
	$(BIN)/python -m suites.benchmarks.simulated_time

soak: $(READY)  ## long runs: 1,000 items in a row, 200 runs of one plan, every fault 20 times, 2,000 random graphs, 50 kills of runs that accept, 2,000 mutated plans, goldens, stored runs and command lines, 90 comparisons of step time, 200 of drawn ones, 300 random models in pipeline stages, memory of every plan beside what ranks allocate; tests run some of it
	$(BIN)/python -m suites.soak.run $(SOAK)

gpu: $(READY)  ## all that only a GPU can tell, part by part, to build/gpu.json; PART=faults: one of them again; without a GPU each is a skip
	$(BIN)/python -m suites.gpu.run $(PART)

compat: $(READY)  ## the table of torch versions in docs/figures.md: TORCHES="2.11 2.15.0", each in an environment of its own below COMPAT
	$(BIN)/python -m suites.torches.run --folder $(COMPAT) --python $(PYTHON) $(TORCHES)

zoo: $(READY) $(ZOO)  ## other people's models and odd modules, each with the outcome it must have; writes docs/zoo.md; tests run a few
	$(BIN)/python -m suites.zoo.run --write

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,docs,models,xdist]'
	-$(BIN)/python -m compileall -qq -j 0 -x '/(transformers/models|torch/testing/_internal|plotly|selenium|sphinx|docutils|pygments|mypy|setuptools|pip)/|/tests?/' .venv/lib  # as pip, but on all cores and without what few import
	touch $@

# Beside the environment, not in it: torchvision comes for CUDA alone, and where transformers finds that it fails to import.
$(ZOO): suites/zoo/requirements.txt | $(READY)
	rm -rf .venv/zoo
	$(BIN)/pip install --quiet --no-deps --no-compile --target .venv/zoo --requirement suites/zoo/requirements.txt
	touch $@

dist: $(READY)  ## sdist and wheel in dist/, checked, and the tutorial followed with the wheel in a fresh environment
	$(BIN)/python -m suites.dist.build

# Beside the environment, too: they would change every run of ours.
$(BESIDE): suites/fit/requirements.txt | $(READY)
	rm -rf .venv/beside
	$(BIN)/pip install --quiet --no-deps --no-compile --target .venv/beside --requirement suites/fit/requirements.txt
	touch $@

clean:
	rm -rf .venv .compat .fxbucket build dist .pytest_cache .mypy_cache .ruff_cache
