# Each target is enough on its own: it makes a virtual environment and installs what it needs there.
# PYTHON=python3.12 chooses an interpreter (3.11 to 3.13), VENV=folder another place than .venv,
# PYTEST_ARGS='-k topk' a part of the tests.

PYTHON ?= python3
VENV ?= .venv
# more processes would each hold the weights of a large layer
PYTEST_ARGS ?= -q -n auto --maxprocesses 4 --dist worksteal

.PHONY: demo test docs
.SILENT:

demo:
	$(call venv,cli)
	$(VENV)/bin/python -m tileops demo

test:
	$(call venv,test)
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

docs:
	$(call venv,docs)
	$(VENV)/bin/python -m mkdocs build --strict

define venv
	command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON): install Python 3.11 to 3.13" >&2; exit 1; }
	$(PYTHON) .ci/venv.py $(VENV) $(1)
endef
