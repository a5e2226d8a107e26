# make run: install what is missing, mount a tree and play one session in it.   make test: all tests.
# make check: format, lint, types and the tests that need no mount.             make bench: ratios (ARGS: its options).
BIN := .venv/bin

.PHONY: run test check bench setup setup-adapters clean
setup:
	@scripts/setup.sh

setup-adapters:
	@scripts/setup.sh adapters

run: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/session.py

test: setup-adapters
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -m "not mount and not slow"

bench: setup-adapters
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
