# What a contributor types. `make test` and `make demo` set everything up by themselves.
.DEFAULT_GOAL := help
.PHONY: help setup demo cluster test unit test-all coverage mutants experiments lint docs proto wheel clean

BIN := .venv/bin
PROTOC := $(BIN)/python -m grpc_tools.protoc -Ielasticdl/proto=proto

help:  ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 16

setup:  ## make .venv: pinned dependencies, Horovod (built once per user), elasticdl
	@scripts/setup.sh

demo:  ## train on real digits while workers come and go; sets up only what that needs
	@scripts/setup.sh demo
	$(BIN)/python scripts/demo.py

cluster: setup  ## a Kubernetes cluster to play with, until Ctrl-C; ARGS="--nodes 2 --gpus 3"
	$(BIN)/python -m tests.cluster $(ARGS)

# Two at a time: most tests of whole jobs wait more than they compute. What shares fixtures stays in one process
# (tests/conftest.py); the long files come first.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup  ## run the tests but the slow ones; ARGS="-k batch_plan" passes options to pytest, ARGS="-n 0" runs one after another
	$(BIN)/python $(PYTEST) -m "not slow" $(ARGS)

# An environment of its own, made in less than a minute: it needs no framework and compiles nothing.
build/unit-env/made: requirements/lock.txt pyproject.toml
	rm -rf $(@D)
	$(or $(PYTHON),python3) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -c requirements/lock.txt -e ".[worker,kubernetes]" \
		hypothesis kubernetes-validate pytest pytest-timeout pytest-xdist
	touch $@

unit: build/unit-env/made  ## run unit tests that need no framework, without the setup; ARGS="tests/unit/test_cli_*.py" runs some
	build/unit-env/bin/python -m pytest -n 2 --dist loadfile \
		$(or $(ARGS),$$(grep -L 'torch\|keras\|tensorflow\|benchmarks\|_benches\|elastic_kit\|job_kit' tests/unit/test_*.py))

test-all: setup  ## run all tests, those included that are slow by nature
	$(BIN)/python $(PYTEST) $(ARGS)

coverage: setup  ## test-all, and which lines and branches it has run, in masters and workers as well
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

build/mutants-env/made: requirements/mutants.txt requirements/lock.txt
	rm -rf $(@D)
	$(or $(PYTHON),python3) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -c requirements/lock.txt -r requirements/mutants.txt
	touch $@

mutants: setup build/mutants-env/made  ## after `make coverage ARGS="-p scripts.mutants.contexts"`: change the package in COUNT random places (400), and tell which changes no test notices; SEED=1 draws others
	build/mutants-env/bin/python scripts/mutants/draw.py $(or $(SEED),0) $(or $(COUNT),400) build/mutants.json
	$(BIN)/python scripts/mutants/run.py build/mutants.json build/mutants.jsonl

experiments: setup  ## test the published experiments, in small and on a cluster; RUN="1 2 3 1_peers" then repeats those (docs/experiments.md)
	$(BIN)/python -m pytest -n 2 --dist loadfile benchmarks/experiments/tests $(ARGS)
	for each in $(RUN); do $(BIN)/python -m benchmarks.experiment$$each || exit; done

lint: setup  ## style, types, layers, and whether the generated code is what the proto file says
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh elasticdl/proto/elasticdl.proto && \
	for file in "$$fresh"/elasticdl/proto/*; do \
		diff -u "elasticdl/proto/$${file##*/}" "$$file" || { echo "elasticdl/proto is out of date: make proto"; exit 1; }; \
	done

# An environment of its own, made in half a minute: it needs no framework.
build/site-env/made: docs/requirements.txt requirements/lock.txt pyproject.toml
	rm -rf $(@D)
	$(or $(PYTHON),python3) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -c requirements/lock.txt -r docs/requirements.txt -e ".[worker]"
	touch $@

docs: build/site-env/made  ## the pages of docs/ and the reference as a site, in build/site; fails where a link leads nowhere
	NO_MKDOCS_2_WARNING=1 build/site-env/bin/python -m mkdocs build --strict
	@echo "$(CURDIR)/build/site/index.html"

proto: setup  ## generate elasticdl/proto from proto/elasticdl.proto
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. elasticdl/proto/elasticdl.proto

build/release-env/made: requirements/release.txt requirements/lock.txt
	rm -rf $(@D)
	$(or $(PYTHON),python3) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -c requirements/lock.txt -r requirements/release.txt
	touch $@

wheel: build/release-env/made  ## of this commit: wheel, sdist, bill of materials and their SHA-256 sums, in dist; twice the same bytes
	build/release-env/bin/python scripts/release.py

clean:  ## remove what setup and the tools made here; the Horovod wheel stays in the user's cache
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find elasticdl tests model_zoo benchmarks scripts examples -name __pycache__ -prune -exec rm -rf {} +
