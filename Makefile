# The two commands are `make up` and `make test`; docs/install.md says what they install.
DEPLOYMENT ?= deployments/smollm2-cpu.yaml

# Without what Python compiled, each of the many processes compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up down test test-long check install clean

up: install
	.venv/bin/tidegate up $(DEPLOYMENT)

down:
	@if [ -x .venv/bin/tidegate ]; then .venv/bin/tidegate down; else echo "nothing is installed, so nothing runs"; fi

install:
	@scripts/install

test:
	@scripts/install --dev
	scripts/check --tests
	.venv/bin/pytest -m "(slow or ray or vllm) and not long"

test-long:
	@scripts/install --dev
	.venv/bin/pytest -m long

check:
	@scripts/install --dev
	scripts/check

# Prepared models stay in the cache directory: they are verified before each use.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
