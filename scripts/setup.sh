#!/usr/bin/env bash
# Brings a fresh Debian 12 or Ubuntu 24.04 to the point where .cache/venv/bin/python runs the project.
#
#   scripts/setup.sh [NAME...]      default: dev; the names are those of scripts/environments.py
#
# As root it installs missing Debian packages; otherwise it says which ones and stops. Environments are made once for a
# user (~/.cache/errata); one that is there costs nothing. Environment: PYTHON names the interpreter to use.
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

mkdir -p .cache
install_packages
python=$(find_python) || stop "no Python >=3.11,<3.14 found: install one, or name it with PYTHON=/path/to/python make setup"
python_has_venv "$python" || stop "$python cannot make virtual environments: install its venv and ensurepip modules, or name another with PYTHON=/path/to/python"
exec "$python" -I scripts/environments.py "${@:-dev}"
