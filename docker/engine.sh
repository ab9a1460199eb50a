#!/usr/bin/env bash
# A container engine of one's own for tests, on a machine that runs none: Debian's docker.io under a directory, with its
# own data root and socket, and the base image that the Dockerfiles use, made with debootstrap (no registry is asked).
#
#   docker/engine.sh up [DIR]       install what is missing (as root), start the engine, import the base image; prints
#                                   its address for DOCKER_HOST
#   docker/engine.sh down [DIR]     remove its containers, stop it, remove its data, and restore the machine's packet filter
#   docker/engine.sh run [DIR] -- COMMAND...     up, COMMAND with DOCKER_HOST and ERRATA_ENGINE set, down
#
# DIR is .cache/engine in the checkout unless it is given. Where the machine cannot run an engine the reason is one line
# on standard error, and the exit status is 69. ENGINE_SUITE and ENGINE_MIRROR name another release and mirror.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

suite=${ENGINE_SUITE:-bookworm}
mirror=${ENGINE_MIRROR:-http://deb.debian.org/debian}
image=debian:$suite-slim
say() { printf 'engine: %s\n' "$*" >&2; }
cannot() { say "$*"; exit 69; }
usage() { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }

install_packages() {
    local missing=() tool
    for tool in dockerd:docker.io docker:docker.io debootstrap:debootstrap docker-compose:docker-compose iptables:iptables ip:iproute2; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || cannot "install ${missing[*]}, then run this again"
    say "installing Debian packages: ${missing[*]}"
    # The package's own service is not wanted: policy-rc.d with 101 keeps apt from starting it.
    local policy=/usr/sbin/policy-rc.d made=
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        made=1
    fi
    local status=0
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y -o DPkg::Lock::Timeout=300 --no-install-recommends "${missing[@]}"; } \
        >"$directory/apt.log" 2>&1 || status=$?
    [ -z "$made" ] || rm -f "$policy"
    [ "$status" = 0 ] || { tail -n 5 "$directory/apt.log" >&2; cannot "apt-get install ${missing[*]} failed ($directory/apt.log)"; }
}

answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# The first three numbers of a /24 that no interface and no route of this machine uses.
free_subnet() {
    local try taken
    taken=$(ip -4 -o addr show; ip -4 route show table all)
    for try in $(seq 250); do
        try=10.213.$(((sum + try) % 250 + 1))
        grep -qF " $try." <<<"$taken" || { echo "$try"; return; }
    done
    return 1
}

# An engine that was killed leaves containerd, and a file with its pid. dockerd does not start beside them.
kill_rest() {
    local process
    for process in /proc/[0-9]*; do
        if grep -qsaF -- "$directory/exec/" "$process/cmdline"; then kill -KILL "${process#/proc/}" 2>/dev/null || :; fi
    done
    rm -f "$directory/pid" "$directory/exec/containerd/containerd.pid"
}

# An engine that was killed leaves its bridge, and every engine leaves its rules.
remove_bridge() {
    local table rule
    ip link del "$bridge" 2>/dev/null || :
    for table in filter nat; do
        iptables -t "$table" -S 2>/dev/null | grep -wF -- "$bridge" | while read -r rule; do
            # shellcheck disable=SC2086  # a rule is words
            iptables -t "$table" -D ${rule#-A } 2>/dev/null || :
        done || :
    done
}

# What every engine changes for the whole machine: chains and the policy of FORWARD in the packet filter, forwarding. It is
# recorded before the first engine starts, and restored after the last one has ended, whichever those are.
before=/run/errata-engine-before

# Whether an engine runs on this machine: this one, or another that needs the same changes. A zombie does not count.
engine_runs() {
    local process
    for process in /proc/[0-9]*; do
        if grep -qsx dockerd "$process/comm" && ! grep -qs '^State:.*zombie' "$process/status"; then return 0; fi
    done
    return 1
}

chains() { { "$1" -t "$2" -S 2>/dev/null || :; } | sed -n 's/^-N \(DOCKER.*\)/\1/p'; }

# Two engines may start or end at once.
locked() { { flock 8 && "$@"; } 8>"$before.lock"; }

record_network() {
    if [ -e "$before" ] || engine_runs; then return 0; fi
    {
        echo "forward $(cat /proc/sys/net/ipv4/ip_forward)"
        local tables table
        for tables in iptables ip6tables; do
            echo "policy $tables $({ "$tables" -S FORWARD 2>/dev/null || :; } | sed -n 's/^-P FORWARD //p')"
            for table in filter nat; do
                chains "$tables" "$table" | sed "s/^/chain $tables $table /"
            done
        done
    } >"$before.new"
    mv "$before.new" "$before"
}

restore_network() {
    if [ ! -e "$before" ] || engine_runs; then return 0; fi
    local tables table chain rule kind name value
    for tables in iptables ip6tables; do
        for table in filter nat; do
            for chain in $(chains "$tables" "$table"); do
                grep -qxF "chain $tables $table $chain" "$before" && continue
                "$tables" -t "$table" -F "$chain"
                "$tables" -t "$table" -S | grep -E -- "-[jg] $chain( |\$)" | while read -r rule; do
                    # shellcheck disable=SC2086  # a rule is words
                    "$tables" -t "$table" -D ${rule#-A }
                done || :
            done
            for chain in $(chains "$tables" "$table"); do
                grep -qxF "chain $tables $table $chain" "$before" || "$tables" -t "$table" -X "$chain" || say "chain $chain stays"
            done
        done
    done
    while read -r kind name value; do
        case $kind in
        policy) [ -z "$value" ] || "$name" -P FORWARD "$value" ;;
        forward) [ "$name" = "$(cat /proc/sys/net/ipv4/ip_forward)" ] || echo "$name" >/proc/sys/net/ipv4/ip_forward || : ;;
        esac
    done <"$before"
    rm -f "$before"
}

start() {
    answers && return 0
    say "starting dockerd in $directory"
    locked record_network
    # A bridge of its own: docker0 is another engine's, if one runs here. Its subnet must be free as well: two bridges
    # with one subnet leave the containers of the second without a network.
    remove_bridge
    local network
    network=$(free_subnet) || cannot "every subnet of 10.213.0.0/16 is taken: remove bridges of engines that are gone (ip link del NAME)"
    ip link add name "$bridge" type bridge && ip addr add "$network.1/24" dev "$bridge" && ip link set "$bridge" up ||
        cannot "no network bridge can be made here"
    kill_rest
    # In a process group of its own: an interrupt at the terminal is for the caller, who then says `down`.
    setsid dockerd --data-root "$directory/data" --exec-root "$directory/exec" -H "$DOCKER_HOST" -b "$bridge" \
        --pidfile "$directory/pid" >"$directory/dockerd.log" 2>&1 </dev/null 9>&- &
    local waited
    for waited in $(seq 300); do
        answers && return 0
        kill -0 $! 2>/dev/null || break
        sleep 0.1
    done
    grep -iE 'level=(error|fatal)|failed' "$directory/dockerd.log" | tail -n 3 >&2 || tail -n 3 "$directory/dockerd.log" >&2
    stop
    cannot "this machine runs no engine: dockerd ended or did not answer within 30 s ($directory/dockerd.log)"
}

# The image's tree as debootstrap makes it, without what a proxy or a mirror of this machine needs; apt's source is $mirror.
make_tree() {
    local tree=$directory/tree
    rm -rf --one-file-system "$tree"
    if ! unshare --mount --pid --fork --kill-child -- debootstrap --variant=minbase "$suite" "$tree" "$mirror" \
        >"$directory/debootstrap.log" 2>&1; then
        tail -n 3 "$directory/debootstrap.log" >&2
        cannot "debootstrap failed ($directory/debootstrap.log): check the network, or name another mirror with ENGINE_MIRROR"
    fi
    rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/* "$tree"/usr/share/{doc,man,locale,info}/*
    printf 'deb %s %s main\n' "$mirror" "$suite" >"$tree/etc/apt/sources.list"
    tar -C "$tree" -cf "$1" .
    rm -rf --one-file-system "$tree"
}

# An engine's images go with it; the tree stays for the next one, 30 days long, for Debian's updates.
import_base() {
    [ -z "$(docker images -q "$image")" ] || return 0
    local key kept
    key=$({ echo "$suite $mirror"; uname -m; declare -f make_tree; } | sha256sum | cut -c1-12)
    kept=${XDG_CACHE_HOME:-$HOME/.cache}/errata/images/debian-$suite-$key.tar
    mkdir -p "${kept%/*}"
    if [ -n "$(find "$kept" -mtime +30 2>/dev/null)" ]; then
        say "$kept is older than 30 days and is made again"
    fi
    find "${kept%/*}" -name '*.tar*' -mtime +30 -delete
    if [ ! -e "$kept" ]; then
        say "making $image with debootstrap (a minute)"
        make_tree "$kept.$$"
        mv "$kept.$$" "$kept"
    fi
    docker import -c 'CMD ["bash"]' - "$image" <"$kept" >/dev/null
}

stop() {
    if answers; then
        # one at a time: several deletes at once can hang an engine
        docker ps -aq | while read -r id; do timeout 60 docker rm -f "$id" >/dev/null || say "container $id stays"; done
        timeout 60 docker network prune -f >/dev/null || say "networks stay"
    fi
    if [ -e "$directory/pid" ]; then
        local pid
        pid=$(cat "$directory/pid")
        kill "$pid" 2>/dev/null || :
        for _ in $(seq 300); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || :
    fi
    kill_rest
    remove_bridge
    locked restore_network
    awk -v under="$directory/" 'index($2, under) == 1 { print $2 }' /proc/mounts | tac | while read -r place; do umount -l "$place" || :; done
    rm -rf --one-file-system "$directory" "$directory.lock"
}

[ $# -ge 1 ] || usage
verb=$1
shift
directory=$root/.cache/engine
if [ $# -gt 0 ] && [ "$1" != -- ]; then
    directory=$(realpath -m "$1")
    shift
fi
export DOCKER_HOST=unix://$directory/sock PATH=$PATH:/usr/sbin:/sbin
sum=$(printf %s "$directory" | cksum | cut -d ' ' -f 1)
bridge=errata$sum
bridge=${bridge:0:15}
# A path of a socket has room for 107 characters.
[ "${#directory}" -le 100 ] || cannot "$directory is too long for a socket's path: name a shorter DIR"
case $verb in
up | run)
    [ "$(id -u)" = 0 ] || cannot "an engine is started by root: put sudo before this"
    # `down` removes the directory, so it has to be ours from the start.
    if [ ! -e "$directory/.engine" ] && [ -n "$(ls -A "$directory" 2>/dev/null)" ]; then
        cannot "$directory is not empty: name a directory that is not there yet"
    fi
    mkdir -p "$directory"
    touch "$directory/.engine"
    exec 9>"$directory.lock"
    flock 9 # two at once: the second finds the engine running
    install_packages
    start
    import_base
    exec 9>&-
    if [ "$verb" = up ]; then
        echo "$DOCKER_HOST"
        exit
    fi
    [ "${1:-}" = -- ] && [ $# -gt 1 ] || usage
    shift
    trap stop EXIT
    ERRATA_ENGINE=$DOCKER_HOST "$@"
    ;;
down)
    [ -e "$directory" ] || exit 0
    [ -e "$directory/.engine" ] || cannot "$directory is no directory of an engine that this program started"
    stop
    ;;
*) usage ;;
esac
