# `make help` says what there is. Debian 12 or Ubuntu 22.04 and later, with git, make, Python 3.11
# or later, and root or sudo; everything else is installed by the targets that need it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
# The newest Python there is, from 3.11 on.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
SUDO := $(if $(filter 0,$(shell id -u)),,sudo -E)
CODE := vllm_fleet tests tools docs/pictures $(wildcard deploy.py upgrade.py rollback.py maintain.py bench.py nccl.py config.py inventory)
TEST_PACKAGES := nginx-light libnginx-mod-http-lua lua-cjson luajit2 lua-check openssl curl \
  prometheus prometheus-alertmanager keepalived chromium
MYPY := -p vllm_fleet -p tests.testbed

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.ready ## Three hosts on this machine, a real deploy, an answer from the gateway
	$(SUDO) $(PY) -m tests.testbed up
	$(SUDO) $(VENV)/bin/pyinfra -y inventory/demo.py deploy.py
	$(SUDO) $(PY) -m tests.testbed.demo

.PHONY: demo-down
demo-down: $(VENV)/.ready ## Remove the demo's hosts and restore this machine; caches are kept
	$(SUDO) $(PY) -m tests.testbed down

.PHONY: check
check: $(VENV)/.ready check-code ## Lint, types, unit tests: under a minute, no root
	$(PY) -m pytest -q -n 2 -m 'not integration and not deploys and not slow' tests/unit

# Two at a time: tests on hosts mostly wait, what needs no host mostly computes; then an upgrade is
# killed on hosts of its own. What the second says is shown when it has ended.
ALONE := $(filter-out %_certificate.py,$(wildcard tests/integration/test_gateway_*.py)) \
  $(wildcard tests/integration/test_release_*.py tests/integration/test_weights_*.py) \
  tests/integration/test_benchmark_gateway.py
KILLED := tests/integration/test_rolling_killed.py
ALONE_SAID := .testbed/test-alone.log
.PHONY: test
test: $(VENV)/.ready check-code test-packages ## Everything that CI runs: check, and tests on real hosts
	@mkdir -p .testbed; \
	$(MAKE) --no-print-directory test-alone >$(ALONE_SAID) 2>&1 & alone=$$!; \
	trap 'kill $$alone 2>/dev/null || true' EXIT; \
	echo "units, gateway, releases, weights, a killed upgrade: see $(ALONE_SAID)"; failed=0; \
	$(MAKE) --no-print-directory test-hosts || failed=1; \
	wait $$alone || failed=1; cat $(ALONE_SAID); exit $$failed

.PHONY: test-alone
test-alone: $(VENV)/.ready test-packages
	$(SUDO) $(PY) -m pytest -q -m 'not integration and not long' tests/unit
	$(SUDO) $(PY) -m pytest -q -m 'not long' $(ALONE)
	$(SUDO) FLEET_TESTBED=$(CURDIR)/.testbed/killed $(PY) -m pytest -q $(KILLED)

.PHONY: test-hosts
test-hosts: $(VENV)/.ready test-packages
	$(SUDO) $(PY) -m pytest -m 'not long' tests/integration $(ALONE:%=--ignore=%) --ignore=$(KILLED) \
	  tests/unit/monitoring/test_live.py

.PHONY: test-long
test-long: $(VENV)/.ready ## What is too long for CI
	$(SUDO) $(PY) -m pytest -m long tests

# Programs that tests run on ports of their own. policy-rc.d keeps the packages from starting
# their services on this machine.
.PHONY: test-packages
test-packages:
	@missing="$$(for p in $(TEST_PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || echo $$p; done)"; \
	[ -z "$$missing" ] && exit 0; echo "installing for the tests:" $$missing; \
	if [ ! -e /usr/sbin/policy-rc.d ]; then \
	  trap '$(SUDO) rm -f /usr/sbin/policy-rc.d' EXIT; \
	  printf '#!/bin/sh\nexit 101\n' | $(SUDO) tee /usr/sbin/policy-rc.d >/dev/null; \
	  $(SUDO) chmod 755 /usr/sbin/policy-rc.d; fi; \
	$(SUDO) apt-get -q update; \
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install $$missing

.PHONY: docs
docs: $(VENV)/.ready ## Write the generated pages: settings, runbook, group_vars
	$(PY) -m vllm_fleet.spec.settings >docs/settings.md
	for group in all gpu gateway monitoring; do \
	  $(PY) -m vllm_fleet.spec.settings $$group >group_vars/$$group.yml; done
	$(PY) -m vllm_fleet.runbook >docs/runbook.md

.PHONY: check-code
check-code: $(VENV)/.ready
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/mypy $(MYPY)

# What the operator's side needs: the locked packages in a virtual environment.
$(VENV)/.ready: requirements-dev.lock pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 or later here ($$(python3 --version 2>&1 || true))." \
	  "Debian 12 and Ubuntu 24.04 have one; on Ubuntu 22.04: apt install python3.11 python3.11-venv," \
	  "or make ... PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "installing python3-venv"; $(SUDO) apt-get -q update; \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -q -y install \
	    "$$($(PYTHON) -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')"; }
	@echo "installing the operator's packages into $(VENV), once"
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@
