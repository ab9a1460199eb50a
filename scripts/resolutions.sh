#!/usr/bin/env bash
# Makes the two virtual environments of `make test-resolutions`: .cache/resolution-lowest from requirements/lowest.lock (each
# direct dependency in the oldest version that pyproject.toml allows), and .cache/resolution-latest with what pip chooses today.
# The argument is an extended regular expression of the test tools' names; both get them as requirements/dev.lock pins them.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'resolutions: %s\n' "$*" >&2; }

python=.cache/venv/bin/python
install() { "$1/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off -q "${@:2}" >.cache/pip-resolutions.log 2>&1 || {
    tail -n 5 .cache/pip-resolutions.log >&2
    rm -rf "$1"
    say "pip failed (.cache/pip-resolutions.log): check the network or pip's index, then run this again"
    exit 1
}; }

# What a build leaves in the checkout would shadow the entry points of a later version.
trap 'rm -rf build openenv_errata.egg-info' EXIT

for which in lowest latest; do
    venv=.cache/resolution-$which
    rm -rf "$venv"
    "$python" -m venv "$venv"
    say "installing the $which dependencies (a minute or two)"
    if [ "$which" = lowest ]; then
        install "$venv" --no-deps -r requirements/lowest.lock
        install "$venv" --no-deps .
    else
        grep -E "^($1)==" requirements/dev.lock >.cache/tools.txt
        install "$venv" . -r .cache/tools.txt
    fi
    "$venv/bin/python" -m pip check >&2
done
