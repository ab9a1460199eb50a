#!/usr/bin/env bash
# Brings a fresh Debian 12 or Ubuntu 24.04 to the point where .cache/venv/bin/python runs the project.
#
# As root it installs missing Debian packages; otherwise it says which ones and stops. The virtual environment is named
# after the lock file and the Python it was made with, so a changed lock makes a new one and an unchanged one costs
# nothing. `setup.sh trainer` adds what trains: torch and TRL, a gigabyte. Environment: PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

python_works() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }
python_has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 /usr/bin/python3}; do
        if command -v "$candidate" >/dev/null && python_works "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Prints the Debian packages that are missing, one a line.
missing_packages() {
    local python tool
    # A sandbox is built of these; Debian's own names of the tools.
    for tool in debootstrap:debootstrap git:git wget:wget gpgv:gpgv unshare:util-linux mount:mount flock:util-linux; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${tool%%:*}" >/dev/null || echo "${tool##*:}"
    done
    [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
    if ! python=$(find_python); then
        [ -n "${PYTHON:-}" ] && return
        echo python3
        echo python3-venv
    elif ! python_has_venv "$python"; then
        case $(readlink -f "$python") in
            /usr/bin/python3.*) echo "$(basename "$(readlink -f "$python")")-venv" ;;
        esac
    fi
}

install_packages() {
    local missing
    missing=$(missing_packages | sort -u | tr '\n' ' ')
    missing=${missing% }
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null || stop "install what provides these Debian packages, then run this again: $missing"
    [ "$(id -u)" = 0 ] || stop "run this, then try again: sudo apt-get install -y $missing"
    say "installing Debian packages: $missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # a list of words
    if ! { apt-get update && apt-get install -y --no-install-recommends $missing; } >.cache/apt.log 2>&1; then
        tail -n 5 .cache/apt.log >&2
        stop "apt-get install $missing failed (.cache/apt.log): repair that, then run this again"
    fi
}

make_venv() {
    local python=$1 venv=$2 total
    rm -rf "$venv" # of a set-up that was interrupted
    total=$(grep -c '==' requirements/dev.lock)
    say "installing up to $total Python packages into $venv (a minute or two)"
    "$python" -m venv "$venv"
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --progress-bar off \
        -r requirements/dev.lock 2>&1 | tee .cache/pip.log |
        awk '/^Collecting/ { if (++n % 25 == 0) { print "setup:   fetched " n; fflush() } }
             /^Installing collected/ { print "setup:   unpacking"; fflush() }' >&2; then
        grep -v '^  ' .cache/pip.log | tail -n 3 >&2
        rm -rf "$venv"
        stop "pip failed (.cache/pip.log): check the network or pip's index, then run this again"
    fi
}

# torch brings what its build needs (CUDA's libraries, or none for a CPU build), so it is resolved by pip and comes first.
add_trainer() {
    local venv=$1 torch
    torch=$(grep '^torch==' requirements/trainer.lock)
    say "adding $torch and $(grep -vc '^#' requirements/trainer.lock) packages that train (a few minutes, a gigabyte)"
    if ! { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        -c requirements/dev.lock -c requirements/trainer.lock "$torch" &&
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --progress-bar off \
            -r requirements/trainer.lock; } >.cache/pip.log 2>&1; then
        grep -v '^  ' .cache/pip.log | tail -n 3 >&2
        stop "pip failed (.cache/pip.log): check the network or pip's index, then run this again"
    fi
}

install_project() {
    if ! "$1/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --no-build-isolation -q \
        -e . -e conformance >.cache/pip.log 2>&1; then
        tail -n 5 .cache/pip.log >&2
        stop "the project itself could not be installed (.cache/pip.log)"
    fi
}

mkdir -p .cache
install_packages
exec 9>.cache/setup.lock
flock 9 # two makes at once: the second finds the work done

python=$(find_python) || stop "no Python >=3.11,<3.14 found: install one, or name it with PYTHON=/path/to/python make setup"
python_has_venv "$python" || stop "$python cannot make virtual environments: install its venv and ensurepip modules, or name another with PYTHON=/path/to/python"

key=$({ cat requirements/dev.lock; "$python" -VV; "$python" -c 'import sys; print(sys.prefix)'; } | sha256sum | cut -c1-12)
venv=.cache/venv-$key
if [ ! -e "$venv/.packages" ]; then
    make_venv "$python" "$venv"
    touch "$venv/.packages"
fi
project=$({ pwd; cat pyproject.toml conformance/pyproject.toml; } | sha256sum) # entry points and package folders are written down at installation
if [ "$(cat "$venv/.project" 2>/dev/null)" != "$project" ]; then
    say "installing the project"
    install_project "$venv"
    printf '%s\n' "$project" >"$venv/.project"
fi
ln -sfn "$(basename "$venv")" .cache/venv
flock -u 9 # other targets do not wait for what trains

if [ "${1:-}" = trainer ]; then
    exec 8>.cache/setup-trainer.lock
    flock 8
    key=$(sha256sum requirements/trainer.lock | cut -c1-12)
    if [ ! -e "$venv/.trainer-$key" ]; then
        add_trainer "$venv"
        touch "$venv/.trainer-$key"
    fi
fi
