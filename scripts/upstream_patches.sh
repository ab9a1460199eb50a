#!/usr/bin/env bash
# Fetches the published wheel and sdist of OpenEnv that rfcs/upstream/*.patch are for, with the hashes of
# requirements/server.lock, into .cache/upstream-patches. Run by `make test-upstream-patches`.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'upstream-patches: %s\n' "$*" >&2; }

python=.cache/venv/bin/python
to=.cache/upstream-patches
mkdir -p "$to"
exec 9>"$to/lock"
flock 9 # two makes at once: the second finds the work done

awk '/^openenv==/ { on = 1 } on { print } on && !/\\$/ { exit }' requirements/server.lock >"$to/requirements.txt"
cmp -s "$to/requirements.txt" "$to/fetched.txt" && exit 0
rm -rf "$to/dist"
for kind in only no; do
    if ! "$python" -m pip download --disable-pip-version-check --no-input --no-deps --progress-bar off -q \
        --require-hashes "--$kind-binary" :all: -d "$to/dist" -r "$to/requirements.txt" >.cache/pip-upstream-patches.log 2>&1; then
        tail -n 3 .cache/pip-upstream-patches.log >&2
        say "pip failed (.cache/pip-upstream-patches.log): check the network or pip's index, then run this again"
        exit 1
    fi
done
cp "$to/requirements.txt" "$to/fetched.txt"
