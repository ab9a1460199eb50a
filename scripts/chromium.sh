#!/usr/bin/env bash
# Installs Debian's Chromium, and `ip` for a network of its own, for tests/browser and tests/viewer where that is
# possible: as root, with apt-get. Elsewhere says so and leaves it to the tests to be skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'chromium: %s\n' "$*" >&2; }

command -v chromium >/dev/null && PATH=$PATH:/sbin:/usr/sbin command -v ip >/dev/null && exit
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "not installed and cannot be installed here: as root, apt-get install -y chromium iproute2"
    exit
fi
say "installing Debian's package"
mkdir -p .cache
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y -o DPkg::Lock::Timeout=300 --no-install-recommends chromium iproute2; } >.cache/apt.log 2>&1; then
    tail -n 5 .cache/apt.log >&2
    say "apt-get install chromium failed (.cache/apt.log): the tests that need it are skipped"
fi
