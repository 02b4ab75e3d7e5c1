# Everything a checkout needs, from one command each. `make demo` and `make test` work on a machine
# that has nothing but Python 3.11 or newer; a second call finds the environment ready.
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PACKAGES := neuraldbg capture models evaluation
SOURCES := $(shell find $(PACKAGES) -type f -not -path '*/__pycache__/*')

.PHONY: demo test check notebooks clean

demo: $(VENV)/demo.stamp
	$(BIN)/python -m neuraldbg demo

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

check: build/typed.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
		--cache-dir ../../.mypy_cache -p neuraldbg

# Runs the notebooks and stores them with their outputs.
notebooks: $(VENV)/dev.stamp
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Pip's default editable mode: the others lose the packages that live outside neuraldbg/.
$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV): this takes a minute or two, once."
	$(INSTALL) --editable '.[cpu,evaluation]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV): this takes a few minutes, once."
	$(INSTALL) --editable '.[cpu,dev]'
	@touch $@

# The type checker needs the packages under the names they are imported by, which only an installed
# copy has. setuptools would carry modules over from an older build/, so that goes first.
build/typed.stamp: $(SOURCES) pyproject.toml $(VENV)/dev.stamp
	rm -rf build
	$(INSTALL) --no-deps --no-build-isolation --target build/typed .
	@touch $@
