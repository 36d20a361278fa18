# Every target is complete on a fresh clone: it makes its own virtual environment and compiles the C++ sources.
#   make demo     train real models three ways and compare them      DEMO_ARGS="--steps 50"
#   make test     run the tests                                      PYTEST_ARGS="-k mlp"
#   make lint     check the style; `make format` applies it
#   make clean    remove environments and build outputs
PYTHON ?= python3
VENV ?= .venv
# Installed first, so that nothing later replaces it; and packages to do without (.ci/run sets both).
TORCH ?= torch torchvision
WITHOUT ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Test files run side by side; each process takes its share of the cores.
TEST_JOBS ?= 2

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
CPP := $(shell find csrc tests/simt -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
BUILD := setup.py fused_remat/_build.py fused_remat/_build_cuda.py fused_remat/_cuda_toolkit.py
LINT_VENV := $(MAKE) --no-print-directory VENV=.venv-lint TORCH= .venv-lint/.extra-lint

.PHONY: demo test lint format clean

demo: $(VENV)/.extra-demo
	$(BIN)/fused-remat compare $(DEMO_ARGS)

test: $(VENV)/.extra-test $(VENV)/.ttsem
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

# The linters need neither torch nor the compiled library.
lint:
	@$(LINT_VENV)
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/clang-format --dry-run -Werror $(CPP)

format:
	@$(LINT_VENV)
	.venv-lint/bin/ruff check --fix .
	.venv-lint/bin/ruff format .
	.venv-lint/bin/clang-format -i $(CPP)

# It runs on older Pythons than it asks for. Where it cannot be installed its tests skip themselves and say so.
$(VENV)/.ttsem: .ci/ttsem.txt | $(VENV)/.extra-test
	@$(PIP_INSTALL) --no-deps --ignore-requires-python --require-hashes --requirement .ci/ttsem.txt \
		|| echo "ttsem cannot be installed here"
	@touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis fused_remat/_C.* fused_remat/_C_cuda.*
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.torch:
	@echo "Installing $(or $(TORCH),build tools) into $(VENV); this happens once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) $(TORCH) ninja packaging 'setuptools>=77'
	@touch $@

# Headers that only compiling needs, and only for CUDA; their package asks for others that nothing here uses. Where it
# cannot be installed, the kernels that need it are left out and `fused-remat doctor` says so.
$(VENV)/.cutlass: .ci/cutlass.txt | $(VENV)/.torch
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then \
		$(PIP_INSTALL) --no-deps --require-hashes --requirement .ci/cutlass.txt \
			|| echo "nvidia-cutlass cannot be installed here"; fi
	@touch $@

# Editable: Python changes need no reinstall, and C++ changes recompile only what they touch.
$(VENV)/.package: $(VENV)/.torch $(VENV)/.cutlass pyproject.toml $(BUILD) $(filter csrc/%,$(CPP))
	@echo "Compiling and installing fused_remat into $(VENV); minutes at first"
	@$(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.extra-%: pyproject.toml .ci/requirements.py | $(VENV)/.package
	@echo "Installing the packages of the '$*' extra into $(VENV)"
	@$(BIN)/python .ci/requirements.py $* $(addprefix --without ,$(WITHOUT)) > $@.txt
	@$(PIP_INSTALL) --requirement $@.txt
	@touch $@
