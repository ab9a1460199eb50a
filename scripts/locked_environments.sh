#!/usr/bin/env bash
# Makes one virtual environment for each lock requirements/NAME-*.lock, for packages that cannot be installed beside
# ours: generations of OpenEnv that share a module name, or oracles with heavy dependencies. Each lies in
# .cache/NAME-VERSION-KEY, named after its lock and the Python it was made with, and is reached by the link
# .cache/NAME-VERSION. Usage: scripts/locked_environments.sh NAME
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:?usage: scripts/locked_environments.sh NAME, of requirements/NAME-*.lock}
say() { printf '%s: %s\n' "$name" "$*" >&2; }

python=.cache/venv/bin/python
exec 9>".cache/$name.lock"
flock 9 # two makes at once: the second finds the work done

for lock in requirements/"$name"-*.lock; do
    version=$(basename "$lock" .lock)
    key=$({ cat "$lock"; "$python" -VV; "$python" -c 'import sys; print(sys.base_prefix)'; } | sha256sum | cut -c1-12)
    venv=.cache/$version-$key
    if [ ! -e "$venv/.packages" ]; then
        rm -rf "$venv" # of a set-up that was interrupted
        say "installing up to $(grep -c '==' "$lock") Python packages into $venv (a minute or two)"
        "$python" -m venv "$venv"
        if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --progress-bar off \
            -r "$lock" 2>&1 | tee .cache/pip-$name.log |
            awk -v name="$name" '/^Collecting/ { if (++n % 25 == 0) { print name ":   fetched " n; fflush() } }
                 /^Installing collected/ { print name ":   unpacking"; fflush() }' >&2; then
            grep -v '^  ' .cache/pip-$name.log | tail -n 3 >&2
            rm -rf "$venv"
            say "pip failed (.cache/pip-$name.log): check the network or pip's index, then run this again"
            exit 1
        fi
        touch "$venv/.packages"
    fi
    ln -sfn "$(basename "$venv")" ".cache/$version"
done
