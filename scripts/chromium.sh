#!/usr/bin/env bash
# Installs Debian's Chromium for tests/browser where that is possible: as root, with apt-get. Elsewhere says so and
# leaves it to the tests to be skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'chromium: %s\n' "$*" >&2; }

command -v chromium >/dev/null && exit
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "not installed and cannot be installed here: as root, apt-get install -y chromium"
    exit
fi
say "installing Debian's package"
mkdir -p .cache
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y -o DPkg::Lock::Timeout=300 --no-install-recommends chromium; } >.cache/apt.log 2>&1; then
    tail -n 5 .cache/apt.log >&2
    say "apt-get install chromium failed (.cache/apt.log): the tests that need it are skipped"
fi
