# make demo    sets up .venv if need be, then trains a capsule network on real digits and shows what it sees
# make test    sets up .venv if need be, then runs the tests
# make lint    ruff, lint and format        make types    mypy        make docs    the documentation site, into site/
# make clean   removes caches and builds, keeps .venv
#
# Another Python: make demo PYTHON=python3.12. From nothing again: rm -rf .venv.
# A PyTorch of your own choice: make .venv and install it there first; it is kept.

PYTHON ?= $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint types docs clean
.NOTPARALLEL:

demo: $(VENV)/.installed-demo
	$(RUN) examples/digits.py

test: $(VENV)/.installed-dev
	$(RUN) -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.installed-dev
	$(RUN) -m mypy

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# .installed-EXTRA says that the package stands in .venv with that extra, as pyproject.toml has it. It starts out as
# .unfinished and gets its name when all is done: a .venv whose making was killed still holds .unfinished, and is made anew.
# Where pip itself gave up (no network, say; exit codes up to 128) nothing is half-done, and the next try goes on from there.
$(VENV)/.installed-%: pyproject.toml $(wildcard native/CMakeLists.txt native/csrc/*)
	@if test -e $(VENV)/.unfinished || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
		rm -rf $(VENV) && mkdir $(VENV) && touch $(VENV)/.unfinished && $(PYTHON) -m venv $(VENV); fi
	@touch $(VENV)/.unfinished
	@echo "Installing torchcaps[$*] into $(VENV). PyTorch is large: the first time takes minutes."
	@$(RUN) -m pip install -q --disable-pip-version-check -e ".[$*]" || \
		{ code=$$?; test $$code -gt 128 || rm $(VENV)/.unfinished; exit $$code; }
	@mv $(VENV)/.unfinished $@

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
