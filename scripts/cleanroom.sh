#!/usr/bin/env bash
# Runs make targets in a Debian 12 made for the purpose, from a clone of HEAD: what a newcomer with make, git and
# nothing else would see. Prints the time of each target, and of a second run of the set-up, which must do nothing.
#
#   scripts/cleanroom.sh [TARGET...]      default: test demo; needs root and debootstrap
#
# The room takes the host's resolver, CA certificates, proxy, apt and pip configuration, because they describe the
# network both are in. CLEANROOM_SUITE and CLEANROOM_MIRROR name another release, CLEANROOM_SCRIPT the debootstrap
# script for one that this debootstrap does not know, CLEANROOM_BIND host directories that the room sees read-only
# (local package indexes), CLEANROOM_DIR the parent directory.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=${CLEANROOM_SUITE:-bookworm}
mirror=${CLEANROOM_MIRROR:-http://deb.debian.org/debian}
targets=${*:-test demo}
say() { printf 'cleanroom: %s\n' "$*" >&2; }

[ "$(id -u)" = 0 ] || { say "needs root: put sudo before it"; exit 1; }
command -v debootstrap >/dev/null || { say "run: apt-get install -y debootstrap"; exit 1; }
parent=${CLEANROOM_DIR:-$PWD/.cache}
mkdir -p "$parent"
room=$(mktemp -d "$parent/cleanroom.XXXXXX")
chmod 755 "$room" # its /: rootless tests are an ordinary user in there
inside=
# Everything that is mounted or started lives in namespaces that end with $inside (which ignores other signals).
trap '[ -z "$inside" ] || kill -KILL "$inside" 2>/dev/null; wait; rm -rf --one-file-system "$room"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

say "bootstrapping $suite in $room"
if ! unshare --mount --pid --fork --kill-child -- debootstrap --variant=minbase --include=ca-certificates,git,make \
    ${CLEANROOM_COMPONENTS:+--components="$CLEANROOM_COMPONENTS"} ${CLEANROOM_KEYRING:+--keyring="$CLEANROOM_KEYRING"} \
    "$suite" "$room" "$mirror" ${CLEANROOM_SCRIPT:+"$CLEANROOM_SCRIPT"} >"$parent/cleanroom.log" 2>&1; then
    tail -n 5 "$parent/cleanroom.log" >&2
    exit 1
fi
git clone -q . "$room/root/errata"
say "clone of $(git log -1 --format='%h %s')"
for file in /etc/resolv.conf /etc/pip.conf "$HOME/.config/pip/pip.conf" /etc/ssl/certs/ca-certificates.crt; do
    if [ -e "$file" ]; then
        copy=$room${file/#$HOME//root}
        mkdir -p "$(dirname "$copy")"
        cp -L "$file" "$copy"
    fi
done
for file in /etc/apt/apt.conf /etc/apt/apt.conf.d/*proxy*; do
    [ ! -e "$file" ] || cp "$file" "$room$file"
done
for directory in ${CLEANROOM_BIND:-}; do mkdir -p "$room$directory"; done

cat >"$room/root/enter" <<'INSIDE'
set -eu
cd /root/errata
run() {
    started=$(date +%s.%N)
    status=0
    make "$1" || status=$?
    awk -v target="$1" -v from="$started" -v to="$(date +%s.%N)" -v status="$status" \
        'BEGIN { printf "cleanroom: make %s: %.1f s, exit status %d\n", target, to - from, status }' >&2
    return "$status"
}
for target in "$@"; do run "$target"; done
run base # all is there: must take no time
INSIDE

# A room of its own, not a chroot: the sandbox calls pivot_root and makes namespaces, which a chroot may not.
# shellcheck disable=SC2016 # expanded by the inner shell
enter='
set -eu
room=$1; shift
mount --bind "$room" "$room"
for directory in /dev /sys; do mount --rbind "$directory" "$room$directory"; done
for directory in ${CLEANROOM_BIND:-}; do mount --bind -o ro "$directory" "$room$directory"; done
mount -t proc proc "$room/proc"
mkdir -p "$room/.host"
cd "$room"
pivot_root . .host
umount -l /.host
rmdir /.host
exec /usr/bin/env -i $PASSED PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
    /bin/sh /root/enter "$@"
'
passed=
for name in http_proxy https_proxy no_proxy PIP_CERT PIP_FIND_LINKS PIP_DEFAULT_TIMEOUT; do
    [ -z "${!name:-}" ] || passed+="$name=${!name} "
done
# shellcheck disable=SC2086 # lists of words
PASSED=$passed unshare --mount --pid --fork --kill-child -- /bin/sh -c "$enter" enter "$room" $targets &
inside=$!
status=0
wait "$inside" || status=$?
inside=
exit "$status"
