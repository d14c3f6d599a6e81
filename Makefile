# The environment is made by the first target that needs it and remade when pyproject.toml changes. `make help` lists the
# targets; PYTHON=/path/to/python chooses the interpreter that the environment is made with.

VENV := .venv
RUN := $(VENV)/bin/python
ARGS ?=
# glibc returns large buffers to the system after each use; XLA:CPU asks for them again at once. Keeping them saves page
# faults (up to 3x in a training step). Other C libraries ignore these.
CPU_ENV := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=20000000000 MALLOC_TOP_PAD_=500000000 MALLOC_ARENA_MAX=1 \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1

# Training and decode steps of three models on 1 and 8 H100, 8 v5e and 8 v6e.
PROOF := --case 'h100-*-1b,h100x8-*-8b,h100x8-*-32b,v*'

.DEFAULT_GOAL := help
.PHONY: help env demo demo-quick test lint types docs browser aot proof clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## *\(.*\)/make \1\t\2/p' Makefile | expand -t 18

env:  ## make or update the environment
	@scripts/environment.sh $(VENV)

demo: env  ## retrofit SmolLM2-135M, evaluate it, draw the plots (10 minutes on 2 CPU cores); ARGS="..." is passed on
	$(CPU_ENV) $(RUN) -m train.demo $(ARGS)

demo-quick: env  ## the same in 2 minutes, with less training
	$(CPU_ENV) $(RUN) -m train.demo --quick $(ARGS)

test: env  ## run the tests in two processes; ARGS="-k name" is passed to pytest
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

lint: env  ## ruff
	$(RUN) -m ruff check .

types: env  ## mypy
	$(RUN) -m mypy

docs: env  ## build the documentation site into build/site; a broken link fails
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(RUN) -m mkdocs build --strict --quiet

browser: docs  ## open the site and the HTML views in headless Chromium; pictures in build/screenshots
	PYTHONPATH=. JAX_PLATFORMS=cpu $(RUN) scripts/check_pages.py $(ARGS)

aot: env  ## compile the GPU kernels for the real hardware; needs no GPU
	@if [ -e kernels/aot_cases.py ]; then \
	    scripts/environment.sh $(VENV) aot && \
	    JAX_PLATFORMS=cpu PYTHONPATH=$(VENV)/aot $(RUN) -m kernels.aot_cases $(ARGS); \
	else \
	    echo "no GPU kernels yet (kernels/aot_cases.py is not there): nothing to compile"; \
	fi

proof: env  ## compile whole training and decode steps of big models for GPUs and TPUs; ARGS="--case '*'" for all
	@scripts/environment.sh $(VENV) aot
	JAX_PLATFORMS=cpu PYTHONPATH=$(VENV)/aot $(RUN) -m benchmarks.compile_proof $(if $(ARGS),$(ARGS),$(PROOF))

clean:  ## remove the environment, caches and builds (not runs/, demo/ and demo-quick/)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
