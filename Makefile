# `make demo` and `make test` need python3 (3.11 or later, with venv and pip), make and
# sh, and nothing else: they set up an environment in .venv and use it.

PYTHON ?= python3
VENV ?= .venv
# processes that share the tests
WORKERS ?= 2
# which tests run: an expression of marks, as for `pytest -m`; empty for all
SELECT ?= not slow
# which tests run on other versions: interfaces; all else runs on the main interpreter
SELECT_OTHER ?= not slow and not once
# which of them run once more with double precision
SELECT_X64 ?= x64 and not slow
# constraints file for pip; empty for the newest versions
CONSTRAINTS ?=
# versions of Python that `make test-other` looks for
VERSIONS ?= 3.11 3.12 3.13

BIN = $(VENV)/bin
# compiled programs are kept here: tests compile many that are the same, and the second
# run of anything compiles hardly any; empty for none
PROGRAMS ?= $(CURDIR)/$(VENV)/programs
export JAX_COMPILATION_CACHE_DIR ?= $(PROGRAMS)
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.3
# A worker takes whole files, because fixtures and compiled programs are shared in a file.
SHARES ?= loadfile
# A test that never ends fails alone, not the whole run with it: the worker is ended,
# because no signal reaches a compiler.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --timeout 600 --timeout-method thread
# Most of the time of a test is the compiler's, and most programs run once: they are not
# optimised, and the compiler has no threads besides the workers. Doctests, the wheel and
# `make demo` compile as users do.
FAST_COMPILER ?= $$($(BIN)/python tests/compiling.py $(COMPILING))
# `--optimised` for tests whose programs run for longer than they compile
COMPILING ?=

.PHONY: help demo test verify verify-double test-single test-double lint format types \
	doctest wheel examples docs lowest test-other clean

help:
	@echo 'make demo        set up .venv and run the demo, examples/covertype.py'
	@echo 'make test        set up .venv and run the quick tests, in float32 and float64'
	@echo 'make verify      run the long tests, most of them statistical checks'
	@echo 'make verify-double  run those that also run in float64'
	@echo 'make lint        check format and style; `make format` repairs them'
	@echo 'make types       check the type hints'
	@echo 'make doctest     run the examples in the docstrings and in the documentation'
	@echo 'make wheel       build, install into an empty environment, and run once'
	@echo 'make examples    run every example at its small size'
	@echo 'make docs        build the documentation, which runs every example at its'
	@echo '                 small size; a warning is an error'
	@echo 'make lowest      run tests of interfaces on the lowest supported versions'
	@echo 'make test-other  run tests of interfaces on every other supported Python found'
	@echo 'make clean       delete environments and everything else that was built'

# One environment, and a stamp in it for each extra that was installed. A stamp is
# older than a changed pyproject.toml, and only then is anything installed again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'numpyro-minibatch needs Python 3.11 or later, and "$(PYTHON)" is not one:'; \
	    $(PYTHON) --version; \
	    echo 'Name another one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)'; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.has-%: pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS:%=--constraint %) \
	    --editable '.[$*]'
	@touch $@

demo: $(VENV)/.has-examples
	$(BIN)/python examples/covertype.py

test: test-single test-double

verify:
	$(MAKE) --no-print-directory test-single SELECT='slow and not long_runs'
	$(MAKE) --no-print-directory test-single SELECT='slow and long_runs' \
	    COMPILING=--optimised SHARES=worksteal

verify-double:
	$(MAKE) --no-print-directory test-double SELECT_X64='x64 and slow'

test-single: $(VENV)/.has-test
	XLA_FLAGS="$(FAST_COMPILER) $$XLA_FLAGS" \
	    $(PYTEST) --dist $(SHARES) -m '$(SELECT)'

test-double: $(VENV)/.has-test
	XLA_FLAGS="$(FAST_COMPILER) $$XLA_FLAGS" JAX_ENABLE_X64=1 \
	    $(PYTEST) --dist $(SHARES) -m '$(SELECT_X64)'

lint: $(VENV)/.has-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check

format: $(VENV)/.has-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

types: $(VENV)/.has-dev
	$(BIN)/mypy

doctest: $(VENV)/.has-test
	$(PYTEST) --doctest-modules --doctest-glob='*.md' \
	    numpyro_minibatch README.md $(wildcard docs/*.md docs/*/*.md)

# The wheel is built from the source distribution, which shows that both are whole.
wheel: $(VENV)/.has-dev
	rm -rf dist $(VENV)-wheel
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet dist/*.whl
	@outside=$$(mktemp -d) && trap 'rm -r "$$outside"' EXIT && \
	    cp tests/smoke.py "$$outside" && \
	    python=$$PWD/$(VENV)-wheel/bin/python && \
	    cd "$$outside" && "$$python" -I smoke.py

examples: $(VENV)/.has-examples
	@set -e; for example in examples/*.py; do \
	    echo "== $$example --small"; \
	    MPLBACKEND=Agg $(BIN)/python "$$example" --small; \
	done

docs: $(VENV)/.has-dev
	XLA_FLAGS="$(FAST_COMPILER) $$XLA_FLAGS" \
	    $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

lowest:
	@if python=$$(tools/find-python 3.11); then \
	    $(MAKE) --no-print-directory test-single PYTHON="$$python" \
	        VENV=$(VENV)-lowest CONSTRAINTS=tests/constraints-lowest.txt \
	        SELECT='$(SELECT_OTHER)'; \
	else \
	    echo 'Skipped: the lowest versions are tested on Python 3.11; none was found.'; \
	fi

test-other: $(VENV)/.created
	@this=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	passed=; failed=; absent=; \
	for version in $(VERSIONS); do \
	    if [ "$$version" = "$$this" ]; then continue; fi; \
	    if ! python=$$(tools/find-python $$version); then \
	        echo "== Python $$version: not found"; absent="$$absent $$version"; \
	        continue; \
	    fi; \
	    echo "== Python $$version: $$python"; \
	    if $(MAKE) --no-print-directory test-single PYTHON="$$python" \
	        VENV=$(VENV)-$$version SELECT='$(SELECT_OTHER)'; \
	    then passed="$$passed $$version"; else failed="$$failed $$version"; fi; \
	done; \
	echo "Python $$this is the one of \`make test\`." \
	    "Others: passed:$${passed:- none}; failed:$${failed:- none};" \
	    "not found:$${absent:- none}."; \
	[ -z "$$failed" ]

clean:
	rm -rf $(VENV) $(VENV)-* dist docs/_build docs/gallery demo-output .mypy_cache .pytest_cache \
	    .ruff_cache
