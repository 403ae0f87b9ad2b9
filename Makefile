# The two commands are `make up` and `make test`; docs/install.md says what they install.
DEPLOYMENT ?= deployments/smollm2-cpu.yaml

# Without what Python compiled, each of the many processes compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up down test test-all fuzz check audit docs install clean

up: install
	.venv/bin/tidegate up $(DEPLOYMENT)

down:
	@if [ -x .venv/bin/tidegate ]; then .venv/bin/tidegate down; else echo "nothing is installed, so nothing runs"; fi

install:
	@scripts/install

# At most 12 minutes on two cores after installation, in three stages:
#   pure tests       decisions, parsers, the simulator: no process is started
#   process tests    gateway workers, supervisors and replica hosts with simulated engines
#   smoke test       one real vLLM on one real Ray: `up`, a question, an adapter, a second replica,
#                    a killed engine, `down`
test:
	@scripts/install --dev
	@scripts/test

# All that `make test` leaves out, for a night: every fault row under load, the OpenAI and Anthropic
# clients and the lifecycle on real vLLM, mode switches, the actuators' contract on Ray, two nodes, overload.
test-all:
	@scripts/install --dev
	@scripts/test --all

# The HTTP server and the reader of bodies, five minutes each; `make test-all` takes half a minute each.
fuzz:
	@scripts/install --dev
	.venv/bin/python -m tests.fuzz.run body_reader
	.venv/bin/python -m tests.fuzz.run http_server

check:
	@scripts/install --dev
	scripts/check

# Known vulnerabilities of all pinned packages (needs network access), and secrets in all tracked files: a minute.
audit:
	@scripts/install --dev
	git ls-files -z | xargs -0 .venv/bin/detect-secrets-hook --baseline .secrets.baseline
	@[ -x build/audit/bin/pip-audit ] || { python3 -m venv build/audit && build/audit/bin/pip install --quiet pip-audit; }
	for set in cpu gpu loadtest dev; do build/audit/bin/pip-audit --disable-pip --no-deps -r requirements/$$set.txt || exit 1; done

# The documentation as a site, in build/site.
docs:
	@scripts/install --dev
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "The documentation is in build/site/index.html; .venv/bin/mkdocs serve shows it, with search, at http://127.0.0.1:8000"

# Prepared models stay in the cache directory: they are verified before each use.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
