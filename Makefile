# Every target does its own set-up: on a fresh Debian 12 or Ubuntu 24.04 `make demo` or `make test` is the first command.

PYTHON_BIN := .cache/venv/bin/python
PYTEST := $(PYTHON_BIN) -m pytest
SUITES := $(PYTHON_BIN) -m tests.suites
TIERS ?= 0 1
BENCHES := $(sort $(wildcard bench/*.py))

.DEFAULT_GOAL := help
.PHONY: help setup base trainer verl demo test test-stress test-full test-unprivileged suites openenv-source chaos-long chaos-fleet fuzz soak simulate simulate-fleet pictures check bench bench-quick lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install Debian packages (as root) and the Python environment, if they are missing: once for a user, seconds for another checkout
	@scripts/setup.sh

base: setup ## build the tree that sandboxes run on, if it is missing (needs root, about a minute)
	@$(PYTHON_BIN) scripts/build_base.py

trainer: ## setup, and what trains, torch and TRL, to the Python environment (a gigabyte)
	@scripts/setup.sh trainer

verl: setup ## the environment of the recipes for VeRL and Monarch, .cache/resolution-verl: this project's wheel, VeRL, Ray, Monarch (two gigabytes)
	@.cache/venv/bin/python -I scripts/environments.py verl

demo: trainer base ## a scripted agent errs in fourteen ways, state(t) and a fork repair it; another repairs a bug; a tiny policy trains, and one learns on tasks that carry over to others
	@.cache/venv/bin/errata demo
	@.cache/venv/bin/errata demo swe
	@.cache/venv/bin/errata demo training
	@.cache/venv/bin/errata demo learning

test: trainer base ## style, types and the tests that need no more than a process (tiers 0 and 1); TIERS="0 1 2 3" for what CI runs
	@$(SUITES) --tiers $(TIERS) $(SUITE_OPTIONS)

test-%: trainer base ## one suite of tests/suites/suites.toml; `make suites` lists them
	@$(SUITES) $*

TIER := 1
PASSES := 1
test-stress: trainer base ## tier TIER=1 PASSES=1 times beside busy loops and disk writers, for 60 minutes each at most; nothing may fail
	@$(PYTHON_BIN) -m tests.stress.load --minutes $$((60 * $(PASSES))) -- $(SUITES) --tiers $$(yes $(TIER) | head -n $(PASSES)) --keep-going

test-full: trainer base ## all tiers whether they have changed or not, every benchmark once, and a clean machine
	@$(SUITES) --tiers 0 1 2 3 4 --keep-going

openenv-source: ## FROM=DIR, a git directory or checkout of huggingface/OpenEnv: export what test-upstream, test-upstream-envs and test-upstream-patches use of it
	@scripts/openenv_source.sh "$(FROM)"

suites: setup ## list the suites of tests
	@$(SUITES) --list

pictures: base ## take the pictures of the viewer in the documents anew; needs root and chromium
	@scripts/chromium.sh
	@ERRATA_PICTURES=docs/pictures $(PYTEST) tests/viewer/test_pictures.py

SESSIONS := 2000
KILLS := 20
SECONDS := 420
LONG_STORM = $(PYTHON_BIN) -m tests.chaos.storm --sessions $(SESSIONS) --at-once 192 --sockets 8 --kills $(KILLS) \
	--seconds $(SECONDS) --calmer 2 --recover-s 300 $(if $(SEED),--seed $(SEED))
chaos-long: base ## the same on SESSIONS=2000 sandboxes with KILLS=20 in SECONDS=420 and longer; needs root; SEED=n repeats
	@$(LONG_STORM)

chaos-fleet: setup ## likewise on counters at 4 workers; KILLS of them are killed, and 2 times their supervisor
	@$(LONG_STORM) --target tests.chaos.environments:TaggedCounter --workers 4 --supervisor-kills 2

fuzz: setup ## 100,000 mutated frames into the multiplexed door; SEED=n draws others
	@ERRATA_FUZZ_FRAMES=100000 ERRATA_FUZZ_SEED=$(or $(SEED),0) $(PYTEST) -s tests/server/test_mux_fuzz_door.py

soak: base ## 2,000 sessions that open, step, are cut, resume, fork and close; MINUTES=20; memory has to stay
	@$(PYTHON_BIN) -m tests.chaos.soak --minutes $(or $(MINUTES),20)

SEEDS := 0..9999
simulate: setup ## the server, its clients and their accidents under each of SEEDS=0..9999; see docs/simulation.md
	@$(PYTHON_BIN) -m tests.server.simulated $(SEEDS)

simulate-fleet: setup ## a fleet of servers, its clients and their accidents under each of SEEDS=0..9999; see docs/simulation.md
	@$(PYTHON_BIN) -m tests.server.simulated.fleet $(SEEDS)

test-unprivileged: setup ## the tests that need neither root nor a sandbox
	@$(SUITES) fast fast-server fast-trainer

check: setup ## style, types and import rules
	@scripts/check.sh

bench: base ## stock OpenEnv and Errata in alternating rounds, full size: hours, on a quiet machine (docs/performance.md)
	@.cache/venv/bin/errata bench --json bench/results/bench.json

bench-quick: base ## run every benchmark once, small: shows that they run, measures nothing
	@.cache/venv/bin/errata bench --quick
	@for bench in $(BENCHES); do \
		if grep -q -e --smoke $$bench; then small=--smoke; else small=; fi; \
		echo "$$bench $$small" && $(PYTHON_BIN) $$bench $$small || exit 1; \
	done

lock: setup ## pin the dependencies anew, within what pyproject.toml allows (uv itself: scripts/lock.sh uv)
	@scripts/lock.sh

clean: ## remove what make made in this directory; ~/.cache/errata stays, with environments, base trees and OpenEnv's source, up to 4 GiB: rm -r it when nothing runs
	@rm -rf .cache/rootless .cache/venv .cache/venv-* .cache/*-[0-9]* .cache/resolution-* .cache/upstream-* .cache/npm .cache/wheel .cache/check .cache/*.log .cache/*.txt .cache/*.lock build dist *.egg-info
	@rm -rf .cache/ci .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
