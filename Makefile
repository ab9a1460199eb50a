# Every target does its own set-up: on a fresh Debian 12 or Ubuntu 24.04 `make demo` or `make test` is the first command.

PYTHON_BIN := .cache/venv/bin/python
PYTEST := $(PYTHON_BIN) -m pytest
WORKERS ?= 2
SIDE_BY_SIDE = $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The simulations take most of the time of tests/server, and nothing in them depends on a version.
RESOLVED := tests/test_internals.py tests/protocol tests/client tests/server --ignore-glob='*simulat*' --ignore-glob='*fuzz*'
# With the latest dependencies, unless WHOLE=1: what they do for us (sockets, HTTP, models, the command line, metrics).
LATEST := tests/test_internals.py tests/protocol tests/client $(addprefix tests/server/test_,$(addsuffix .py,adoption \
	announcement any_environment cli client_frames codec connections doors harness http_doors metrics mux_door plain_ws \
	request_bodies rewards task_api unfinished_messages volatile_fields wire)) --ignore-glob='*simulat*' --ignore-glob='*fuzz*'
BENCHES := $(sort $(wildcard bench/*.py))

.DEFAULT_GOAL := help
.PHONY: help setup base trainer demo test test-long test-conformance test-docker test-browser test-interop test-swe test-resolutions openenv-source test-upstream test-upstream-patches test-upstream-envs test-chaos chaos-long fuzz soak simulate test-unprivileged test-cleanroom test-full check bench bench-quick lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

test: base trainer ## all tests but the slow ones, in WORKERS=2 processes; then the ten files that cost most
	@$(SIDE_BY_SIDE) --slowest-files 10 -rs -m "not chaos and not interop and not swe and not browser and not wheel and not docker and not conformance and not long"

test-long: base trainer ## 2,000 schedules of the simulated server, 500 of which make test runs, and errata demo learning
	@$(PYTHON_BIN) -m tests.server.simulated 0..1999 --jobs $(WORKERS)
	@$(PYTEST) -m long tests/trainer

test-conformance: setup ## every wrong server of the conformance kit is caught by what it breaks; waits more than it computes
	@$(PYTEST) -n 6 -m conformance tests/conformance

test-browser: setup ## the web interface in Debian's Chromium, which is installed if that is possible here
	@scripts/chromium.sh
	@timeout 300 $(PYTEST) -m browser -rs tests/browser

test-interop: base ## clients and servers of OpenEnv 0.3.0 and 0.10.0, each in its own environment, against ours
	@scripts/locked_environments.sh interop
	@$(PYTEST) -m interop tests/interop

CHECKER := check-jsonschema==0.39.0
DOCKER_TESTS := $(PYTEST) -m docker -rs tests/docker tests/sandbox/docker
test-docker: base ## compose.yaml, sandboxes as containers, the broker; on an engine of its own, or ERRATA_ENGINE=unix:///PATH
	@scripts/locked_environments.sh interop
	@scripts/locked_environments.sh compose
	@if [ -n "$$ERRATA_ENGINE" ]; then exec $(DOCKER_TESTS); fi; \
	docker/engine.sh run -- $(DOCKER_TESTS); status=$$?; \
	if [ $$status = 69 ] && [ -z "$$REQUIRE_ALL" ]; then echo "test-docker: skipped, no engine runs here (above)"; exit 0; fi; \
	exit $$status

ORACLES := 5.0.2 4.1.0
AGENTS := mini-swe-agent-2.4.6
RUNNERS := pytest-4.6.11 pytest-5.4.3 pytest-6.2.5 pytest-7.4.4 pytest-8.4.2 sympy-1.12
test-swe: base ## the rules of SWE-bench against both generations of swebench, mini-swe-agent, and what needs other Pythons than ours
	@scripts/locked_environments.sh swebench
	@scripts/locked_environments.sh runner
	@scripts/locked_environments.sh mini-swe-agent
	@$(SIDE_BY_SIDE) -m swe -rs tests/envs/swe tests/end_to_end

TOOLS := pytest|pytest-asyncio|pytest-timeout|pytest-xdist|hypothesis|jsonschema|packaging|pyarrow
RESOLUTION_OPTIONS := -W default -W ignore::ResourceWarning -p no:anyio -m "not chaos and not interop and not swe and not browser and not docker and not sandbox"
test-resolutions: base ## protocol, client and server with the oldest dependencies that pyproject.toml allows, and with the latest (WHOLE=1: all of them with these, too); the wheel
	@scripts/resolutions.sh '$(TOOLS)'
	@echo "resolutions: lowest"; .cache/resolution-lowest/bin/python -m pytest -n $(WORKERS) --dist loadfile $(RESOLUTION_OPTIONS) $(RESOLVED)
	@echo "resolutions: latest"; .cache/resolution-latest/bin/python -m pytest -n $(WORKERS) --dist loadfile $(RESOLUTION_OPTIONS) \
		$(if $(WHOLE),$(RESOLVED),$(LATEST))
	@$(PYTEST) -m wheel tests/test_packaging.py

openenv-source: ## FROM=DIR, a git directory or checkout of huggingface/OpenEnv: export what test-upstream, test-upstream-envs and test-upstream-patches use of it
	@scripts/openenv_source.sh "$(FROM)"

test-upstream-envs: setup ## errata probe on nine of OpenEnv's environments (make openenv-source), and on small ones
	@scripts/upstream_envs.sh
	@$(PYTEST) -n $(WORKERS) -m interop -rs tests/upstream_envs
	@.cache/upstream-envs/bin/python -m pytest -rs tests/server/test_detecting.py -k openenvs_own_python_environments

test-upstream: setup ## OpenEnv's own server tests (make openenv-source) on our server and on adopted apps
	@$(PYTEST) -m interop -rs tests/upstream

test-upstream-patches: setup ## rfcs/upstream/*.patch on OpenEnv's published wheel and sdist: their tests, OpenEnv's (make openenv-source), and the bytes of stock
	@scripts/upstream_patches.sh
	@$(PYTEST) -m interop -rs tests/upstream_patches

test-chaos: base ## networks, servers and disks that fail under load, a few minutes; docs/guarantees.md
	@$(PYTEST) -m chaos

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
	@$(SIDE_BY_SIDE) -rs -m "not chaos and not interop and not swe and not browser and not wheel and not docker and not conformance and not long and not sandbox"

test-cleanroom: setup ## `make test` and `make demo` on a Debian made for the purpose (needs root, several minutes)
	@scripts/cleanroom.sh test demo

test-full: WHOLE := 1
test-full: check test test-long test-conformance test-browser test-interop test-swe test-resolutions test-upstream test-upstream-patches test-upstream-envs test-chaos bench-quick test-cleanroom ## everything

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
