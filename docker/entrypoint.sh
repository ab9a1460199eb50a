#!/bin/sh
# Starts a command in the container of environments.
set -eu
say() { printf 'entrypoint: %s\n' "$*" >&2; }

if [ "$(id -u)" = 0 ] && [ "${ERRATA_SANDBOX:-namespace}" = namespace ]; then
    # Engines mount /sys/fs/cgroup read-only, also for a container with CAP_SYS_ADMIN. Memory and processes of each
    # sandbox are limited by cgroups below the container's own. A line of /proc/mounts: device, place, type, options.
    for place in /sys/fs/cgroup /sys/fs/cgroup/memory /sys/fs/cgroup/pids /sys/fs/cgroup/cpu; do
        if grep -q "^[^ ]* $place cgroup2\{0,1\} ro," /proc/mounts; then
            mount -o remount,bind,rw "$place" 2>/dev/null || say "$place stays read-only: the server's log says what is not limited"
        fi
    done
fi

# A volume that a server wrote as root belongs to root. After a chown this server continues its sessions.
for place in "${HOME:-}" "${ERRATA_DATA_DIR:-}"; do
    if [ -e "$place" ] && [ ! -w "$place" ]; then
        say "$place is not writable for $(id -un): give it the volume:" \
            "docker run --rm -u root -v VOLUME:/data --entrypoint chown IMAGE -R $(id -u):$(id -g) /data"
        exit 78
    fi
done

# The image's base tree goes to the volume, where mounts of it can be id-mapped: an engine's own overlay cannot. Base
# trees of sessions on the volume stay; the new one is for sessions that start from now on.
tree=/var/lib/errata/bases/default
if [ "${ERRATA_SANDBOX:-namespace}" = namespace ] && [ -e "$tree" ] \
    && [ ! -e "$ERRATA_BASE_DIR/$(readlink "$tree")" ]; then
    # What the server would refuse is refused before the copy, which takes half a minute and fills the volume.
    case "${1:-} ${2:-}" in "errata serve") "$@" --check ;; esac
    if [ "$(id -u)" = 0 ] && ! unshare --mount --propagation unchanged true 2>/dev/null; then
        say "this container cannot make sandboxes: start it with 'docker compose up envs', or with the capabilities and options of docs/docker.md, which OpenEnv's from_docker_image does not give"
        exit 1
    fi
    # A volume with an fsGroup of Kubernetes hands its set-group-ID bit on to new directories; sandboxes would show it.
    mkdir -p "$ERRATA_BASE_DIR"
    chmod g-s "$ERRATA_BASE_DIR"
    if [ -n "${ERRATA_DATA_DIR:-}" ]; then
        mkdir -p -m 700 "$ERRATA_DATA_DIR"
        chmod g-s "$ERRATA_DATA_DIR"
    fi
    errata base import "$tree" default --directory "$ERRATA_BASE_DIR" >/dev/null
fi
exec "$@"
