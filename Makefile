# Two commands do everything on a machine that has Python, pip and make:
#   make reproduce   the product's main job; prints where its page is
#   make test        the tests
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SCALE ?= quick

.PHONY: reproduce test check docs drill bench browser clean
.DELETE_ON_ERROR:

reproduce: .venv/installed
	@$(BIN)/locater reproduce --scale $(SCALE)

test: .venv/installed-dev browser
	@$(BIN)/python -m pytest -n auto

# the browser tests want a Chromium; without one they are skipped and say so
browser:
	@command -v chromium >/dev/null || [ -n "$$LOCATER_CHROMIUM" ] || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing Chromium" >&2 && \
	    apt-get update -qq >/dev/null && apt-get install -y -qq chromium >/dev/null 2>&1; } || \
	  echo "no Chromium (apt-get install chromium): the browser tests will be skipped" >&2

check: .venv/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# kills, full disks, mutated files, hostile pages: hours, on two cores that do other work too
drill: .venv/installed-dev browser
	@$(BIN)/python -m pytest -m drill tests/drills -s -v -n auto --dist worksteal --durations 0

# the guides, commands and public names as a site, in out/site; a dead link is an error
docs: .venv/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo out/site/index.html

bench: .venv/installed-dev
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

.venv/bin/python:
	@$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "setting up .venv (once, a few minutes)" >&2
	@$(INSTALL) -e '.[lab,hub,hf]'
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "setting up .venv for development (once, a few minutes)" >&2
	@$(INSTALL) -e '.[dev]'
	@touch .venv/installed $@

clean:
	@rm -rf .venv out
