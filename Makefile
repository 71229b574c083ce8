# make demo   the main job on real input, into an embedded broker
# make test   format, lint, types, and every test
# Both set themselves up; Python 3.11+ and Java 17+ are all they need.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: demo test setup check unit loopback integration format clean

setup: $(SETUP)

$(SETUP): setup.cfg pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[local,test]'
	@touch $@

demo: $(SETUP)
	$(BIN)/python jobs/demo.py

test: check unit loopback integration

check: $(SETUP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(SETUP)
	$(BIN)/python -m pytest tests/unit -q

loopback: $(SETUP)
	$(BIN)/python -m pytest tests/loopback -q

integration: $(SETUP)
	$(BIN)/python -m pytest tests/integration -q

format: $(SETUP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
