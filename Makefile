# Two commands matter: `make train` on a bare machine, and `make test` before a change is sent.

PYTHON ?= $(shell launch/find_python.sh)
CONFIG ?= configs/tiny.py
# One file needs no second worker, and no start of the first.
FILES := $(filter tests/%,$(ARGS))
WORKERS ?= $(if $(and $(findstring .py,$(FILES)),$(filter 1,$(words $(FILES)))),0,2)
# A file stays with one worker; tests/conftest.py says which come first.
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# For tests of which one may take long: its limit.
LONG := -o faulthandler_timeout=3600
VENV := .venv
VENV_311 := .venv-311
VENV_AOT := .venv-aot
VENV_TPU := .venv-aot-tpu
VENV_PARITY := .venv-parity
VENV_NOTEBOOKS := .venv-notebooks
VENV_DOCS := .venv-docs
VENV_CLUSTER := .venv-cluster
VENV_STORES := .venv-stores
PARITY_TESTS := beartype hypothesis jaxtyping pytest pytest-xdist

.DEFAULT_GOAL := help
.PHONY: help install train test test-all test-hardware test-311 aot aot-tpu parity cluster faults stores compose docs notebooks package lint size format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## make .venv with moejax and its tools (PYTHON=... to choose)

train: $(VENV)/.installed ## train a small model (CONFIG=..., ARGS=--config.train.num_steps=50)
	$(VENV)/bin/python -m moejax.train --config $(CONFIG) $(ARGS)

test: $(VENV)/.installed ## run the tests that a change must pass, on eight simulated CPU devices (ARGS=tests/moe)
	$(VENV)/bin/python -m pytest $(SPREAD) $(ARGS)

test-all: $(VENV)/.installed ## run all tests that need nothing else, as CI does (CASES=every: of the largest grids every case, hours)
	$(VENV)/bin/python -m pytest $(LONG) $(SPREAD) -m "not accelerator and not aot and not aot_tpu and not parity and not package and not cluster and not faults$(if $(CASES),, and not exhaustive)$(if $(REST), and slow)" $(ARGS)

test-hardware: $(VENV)/.installed ## check kernels, collectives and a small run on the GPUs here (JAX_PLATFORMS=tpu: TPUs)
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cuda} $(VENV)/bin/python -m pytest $(LONG) -m accelerator tests/hardware $(ARGS)

test-311: $(VENV_311)/.installed ## run the tests of `make test` on Python 3.11, with its older JAX
	$(VENV_311)/bin/python -m pytest $(SPREAD) $(ARGS)

aot: $(VENV_AOT)/.installed ## compile step and kernels for described H200s and test what came out (ARGS="-m aot": all cases)
	$(VENV_AOT)/bin/python -m pytest $(LONG) $(SPREAD) -m "aot and not exhaustive" tests/hlo tests/kernels tests/benchmarks $(ARGS)

aot-tpu: $(VENV_TPU)/.installed ## the same for TPU v5p and v6e; takes long, so not in CI
	$(VENV_TPU)/bin/python -m pytest $(LONG) -m aot_tpu tests/hlo $(ARGS)

parity: $(VENV_PARITY)/.installed ## compare exported models with transformers, two families (ARGS="-m parity": all)
	$(VENV_PARITY)/bin/python -m pytest $(LONG) $(SPREAD) -m "parity and not exhaustive" tests/parity $(ARGS)

compose: $(VENV)/.installed ## train random combinations of features beside the oracle, all pairs (takes hours; ARGS="--number 5")
	$(VENV)/bin/python -m tests.compose $(ARGS)

docs: $(VENV_DOCS)/.installed ## build the pages of docs/ as a site in build/site; a broken link fails
	@# Not quiet: mkdocs counts the warnings that it shows, and fails if there is one.
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/python -m mkdocs build

notebooks: $(VENV_NOTEBOOKS)/.installed ## execute the notebooks on CPU, with few steps (ARGS="-k routes")
	JAX_PLATFORMS=cpu MOEJAX_NOTEBOOK_STEPS=30 MOEJAX_NOTEBOOK_TRACES=8 $(VENV_NOTEBOOKS)/bin/python -m pytest $(SPREAD) notebooks $(ARGS)

faults: $(VENV)/.installed ## kill, stop and damage what can be, and see runs recover (takes long; ARGS="-k random")
	$(VENV)/bin/python -m pytest $(LONG) -m faults $(ARGS)

cluster: $(VENV_CLUSTER)/.installed ## train on a real Slurm of two nodes, and through sshd, on this machine (root; slurmctld slurmd slurm-client munge openssh-server)
	$(VENV_CLUSTER)/bin/python -m pytest $(LONG) -m "cluster or exhaustive" tests/launch $(ARGS)

stores: $(VENV_STORES)/.installed ## copy checkpoints to servers of S3 and Google Cloud Storage on this machine
	$(VENV_STORES)/bin/python -m pytest tests/checkpoint/test_remote.py $(ARGS)

package: $(VENV)/.installed ## build wheel and sdist, install the wheel in an empty environment, use it there (ARGS="-m package": both)
	$(VENV)/bin/python -m pytest $(LONG) -m "package and not exhaustive" tests/packaging $(ARGS)

lint: $(VENV)/.installed ## check style, Dockerfile, layers, spelling and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(VENV)/bin/pyright

size: $(VENV)/.installed ## lines of the package by room, and what is over its budget
	@$(VENV)/bin/python -m tests.size

format: $(VENV)/.installed ## rewrite the code in the project's style
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

clean: ## remove environments, caches and build outputs; runs/ stays
	rm -rf $(VENV) $(VENV_311) $(VENV_AOT) $(VENV_TPU) $(VENV_PARITY) $(VENV_NOTEBOOKS) $(VENV_DOCS) $(VENV_CLUSTER) $(VENV_STORES) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find moejax tests configs launch benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last, so an interrupted install is taken up again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" # find_python.sh has said what is missing
	@echo "installing moejax and its tools into $(VENV): some minutes the first time"
	"$(PYTHON)" -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@touch $@

$(VENV_311)/.installed: pyproject.toml constraints.txt
	python=$$(launch/find_python.sh 11) && "$$python" -m venv $(VENV_311)
	$(VENV_311)/bin/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@touch $@

# Of its own: JAX would look for GPUs at every start, and complain that there are none.
$(VENV_AOT)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV_AOT)
	$(VENV_AOT)/bin/python -m pip install --quiet --editable '.[dev,aot,kernels]' --constraint constraints.txt
	@touch $@

$(VENV_TPU)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV_TPU)
	$(VENV_TPU)/bin/python -m pip install --quiet --editable '.[dev,tpu]' --constraint constraints.txt
	@touch $@

# Python 3.11 where it is: a wheel of torch without CUDA, if pip's configuration has one, is for it.
# Not dev: of that the tests need little, and the rest is a third of the time to install.
$(VENV_PARITY)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)"
	python=$$(launch/find_python.sh 11 2>/dev/null || echo "$(PYTHON)") && "$$python" -m venv $(VENV_PARITY)
	$(VENV_PARITY)/bin/python -m pip install --quiet --editable '.[parity,serve]' $(PARITY_TESTS) --constraint constraints.txt
	@touch $@

# Of its own: the schemas of all versions of Kubernetes are 110 MB.
$(VENV_CLUSTER)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV_CLUSTER)
	$(VENV_CLUSTER)/bin/python -m pip install --quiet --editable '.[dev,cluster]' --constraint constraints.txt
	@touch $@

# Of its own: the clients and servers of two clouds are a hundred packages.
$(VENV_STORES)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV_STORES)
	$(VENV_STORES)/bin/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@# Apart: together with the constraints pip takes an s3fs that is years old.
	$(VENV_STORES)/bin/python -m pip install --quiet --upgrade gcsfs s3fs 'moto[server]' gcp-storage-emulator
	@touch $@

# Of its own: a Jupyter kernel is thirty packages that nothing else needs.
$(VENV_NOTEBOOKS)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV_NOTEBOOKS)
	$(VENV_NOTEBOOKS)/bin/python -m pip install --quiet --editable '.[notebooks]' --constraint constraints.txt
	@touch $@

# Without moejax, whose docstrings are read and not imported: its extra is asked for what it lists.
$(VENV_DOCS)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV_DOCS)
	"$(PYTHON)" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(VENV_DOCS)/requirements.txt
	$(VENV_DOCS)/bin/python -m pip install --quiet --requirement $(VENV_DOCS)/requirements.txt --constraint constraints.txt
	@touch $@
