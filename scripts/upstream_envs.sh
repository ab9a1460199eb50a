#!/usr/bin/env bash
# Makes the Python that tests/upstream_envs runs OpenEnv's own environments with: what requirements/upstream-envs.lock
# pins, beside the packages of development, which it sees through a .pth file. It lies in .cache/upstream-envs-KEY, named
# after both locks and Python, and is reached by the link .cache/upstream-envs. Run by `make test-upstream-envs`.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'upstream-envs: %s\n' "$*" >&2; }

python=.cache/venv/bin/python
lock=requirements/upstream-envs.lock
exec 9>.cache/upstream-envs.lock
flock 9 # two makes at once: the second finds the work done

key=$({ cat "$lock" requirements/dev.lock; "$python" -VV; "$python" -c 'import sys; print(sys.base_prefix)'; } | sha256sum | cut -c1-12)
venv=.cache/upstream-envs-$key
if [ ! -e "$venv/.packages" ]; then
    rm -rf "$venv" # of a set-up that was interrupted
    say "installing $(grep -c '==' "$lock") Python packages into $venv (a minute)"
    "$python" -m venv "$venv"
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --progress-bar off \
        -r "$lock" >.cache/pip-upstream-envs.log 2>&1; then
        tail -n 3 .cache/pip-upstream-envs.log >&2
        rm -rf "$venv"
        say "pip failed (.cache/pip-upstream-envs.log): check the network or pip's index, then run this again"
        exit 1
    fi
    touch "$venv/.packages"
fi
"$python" - "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY'
import pathlib, sys, sysconfig

seen = sysconfig.get_path("purelib")
pathlib.Path(sys.argv[1], "errata-development.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
PY
ln -sfn "$(basename "$venv")" .cache/upstream-envs
