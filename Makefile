# Every target does its own set-up: on a fresh Debian 12 or Ubuntu 24.04 `make demo` or `make test` is the first command.

PYTHON_BIN := .cache/venv/bin/python
PYTEST := $(PYTHON_BIN) -m pytest
SUITES := $(PYTHON_BIN) -m tests.suites
TIERS ?= 0 1
BENCHES := $(sort $(wildcard bench/*.py))

.DEFAULT_GOAL := help
.PHONY: help setup base trainer demo test test-stress test-full test-unprivileged suites openenv-source chaos-long fuzz soak simulate check bench bench-quick lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install Debian packages (as root) and the Python environment, if they are missing
	@scripts/setup.sh

base: setup ## build the tree that sandboxes run on, if it is missing (needs root, about a minute)
	@$(PYTHON_BIN) scripts/build_base.py

trainer: setup ## add what trains, torch and TRL, to the Python environment (a gigabyte)
	@scripts/setup.sh trainer

demo: base trainer ## a scripted agent errs in fourteen ways, state(t) and a fork repair it; another repairs a bug; a tiny policy trains, and one learns on tasks that carry over to others
	@.cache/venv/bin/errata demo
	@.cache/venv/bin/errata demo swe
	@.cache/venv/bin/errata demo training
	@.cache/venv/bin/errata demo learning

test: base trainer ## style, types and the tests that need no more than a process (tiers 0 and 1); TIERS="0 1 2 3" for what CI runs
	@$(SUITES) --tiers $(TIERS) $(SUITE_OPTIONS)

test-%: base trainer ## one suite of tests/suites/suites.toml; `make suites` lists them
	@$(SUITES) $*

test-stress: base trainer ## tier 1 three times and tier 2 once beside busy loops and disk writers; nothing may fail
	@$(PYTHON_BIN) -m tests.stress.load -- $(SUITES) --tiers 1 1 1 2 --keep-going

test-full: base trainer ## all tiers whether they have changed or not, every benchmark once, and a clean machine
	@$(SUITES) --tiers 0 1 2 3 4 --fresh --keep-going

openenv-source: ## FROM=DIR, a git directory or checkout of huggingface/OpenEnv: export what test-upstream, test-upstream-envs and test-upstream-patches use of it
	@scripts/openenv_source.sh "$(FROM)"

suites: setup ## list the suites of tests
	@$(SUITES) --list

SESSIONS := 2000
KILLS := 20
SECONDS := 420
chaos-long: base ## the same on SESSIONS=2000 sandboxes with KILLS=20 in SECONDS=420 and longer; needs root; SEED=n repeats
	@$(PYTHON_BIN) -m tests.chaos.storm --sessions $(SESSIONS) --at-once 192 --sockets 8 --kills $(KILLS) \
		--seconds $(SECONDS) --calmer 2 --recover-s 300 $(if $(SEED),--seed $(SEED))

fuzz: setup ## 100,000 mutated frames into the multiplexed door; SEED=n draws others
	@ERRATA_FUZZ_FRAMES=100000 ERRATA_FUZZ_SEED=$(or $(SEED),0) $(PYTEST) -s tests/server/test_mux_fuzz_door.py

soak: base ## 2,000 sessions that open, step, are cut, resume, fork and close; MINUTES=20; memory has to stay
	@$(PYTHON_BIN) -m tests.chaos.soak --minutes $(or $(MINUTES),20)

SEEDS := 0..9999
simulate: setup ## the server, its clients and their accidents under each of SEEDS=0..9999; see docs/simulation.md
	@$(PYTHON_BIN) -m tests.server.simulated $(SEEDS)

test-unprivileged: setup ## the tests that need neither root nor a sandbox
	@$(SUITES) fast

check: setup ## style, types and import rules
	@status=0; \
	for tool in "ruff check --quiet --output-format concise ." "ruff format --quiet --check ." \
		"mypy --no-error-summary" "lint-imports --no-logo"; do \
		.cache/venv/bin/$$tool || { echo "check: $$tool failed"; status=1; }; \
	done; \
	MYPYPATH=server/errata_server/sandbox/launcher .cache/venv/bin/mypy --no-error-summary --config-file= --strict \
		--cache-dir .mypy_cache/launcher -m launcher -m fake_root || { echo "check: mypy of the launcher failed"; status=1; }; \
	exit $$status

bench: base ## stock OpenEnv and Errata in alternating rounds, full size: hours, on a quiet machine (docs/performance.md)
	@.cache/venv/bin/errata bench --json bench/results/bench.json

bench-quick: base ## run every benchmark once, small: shows that they run, measures nothing
	@.cache/venv/bin/errata bench --quick
	@for bench in $(BENCHES); do \
		if grep -q -e --smoke $$bench; then small=--smoke; else small=; fi; \
		echo "$$bench $$small" && $(PYTHON_BIN) $$bench $$small || exit 1; \
	done

# What `make lock` pins for environments of their own: oracles, old test runners, agents, and the tools of the test environments.
ORACLES := 5.0.2 4.1.0
AGENTS := mini-swe-agent-2.4.6
RUNNERS := pytest-4.6.11 pytest-5.4.3 pytest-6.2.5 pytest-7.4.4 pytest-8.4.2 sympy-1.12
CHECKER := check-jsonschema==0.39.0
TOOLS := pytest|pytest-asyncio|pytest-timeout|pytest-xdist|hypothesis|jsonschema|packaging|pyarrow
lock: setup ## pin the dependencies anew, within what pyproject.toml allows
	@test -x .cache/uv/bin/uv || { $(PYTHON_BIN) -m venv .cache/uv && .cache/uv/bin/pip install -q uv; }
	@.cache/uv/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate \
		--custom-compile-command "make lock" --extra dev -o requirements/dev.lock pyproject.toml
	@for pin in openenv-core==0.3.0 openenv==0.10.0; do echo $$pin | .cache/uv/bin/uv pip compile --quiet --upgrade \
		--universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
		-o requirements/interop-$${pin##*==}.lock - || exit 1; done
	@for pin in $(ORACLES:%=swebench-%) $(RUNNERS:%=runner-%); do \
		package=$${pin#runner-}; echo $${package%-*}==$${package##*-} | .cache/uv/bin/uv pip compile --quiet --upgrade \
		--universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
		-o requirements/$$pin.lock - || exit 1; done
	@for pin in $(AGENTS); do echo $${pin%-*}==$${pin##*-} | .cache/uv/bin/uv pip compile --quiet --upgrade \
		--universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
		-o requirements/$$pin.lock pyproject.toml - || exit 1; done
	@.cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --generate-hashes \
		--custom-compile-command "make lock" --extra docker -c requirements/dev.lock -o requirements/server.lock pyproject.toml
	@printf 'setuptools>=77\nwheel\n' | .cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
		--generate-hashes --custom-compile-command "make lock" -o requirements/build.lock -
	@echo $(CHECKER) | .cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
		--custom-compile-command "make lock" -o requirements/compose-$(subst ==,-,$(CHECKER)).lock -
	@grep -E '^($(TOOLS))==' requirements/dev.lock | .cache/uv/bin/uv pip compile --quiet --upgrade --resolution lowest-direct \
		--universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" -o requirements/lowest.lock pyproject.toml -
	@$(PYTHON_BIN) scripts/lock_trainer.py torch==2.13.0 > .cache/trainer.lock && mv .cache/trainer.lock requirements/trainer.lock
	@$(PYTHON_BIN) scripts/lock_upstream_envs.py > .cache/upstream-envs.new && mv .cache/upstream-envs.new requirements/upstream-envs.lock

clean: ## remove what make made in this directory; base trees and OpenEnv's source stay in ~/.cache/errata
	@rm -rf .cache/rootless .cache/venv .cache/venv-* .cache/interop-* .cache/resolution-* .cache/uv .cache/*.log .cache/*.lock build dist *.egg-info
	@rm -rf .cache/ci .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
