#!/usr/bin/env bash
# Exports what tests use of OpenEnv's own code, which this repository does not hold: three of its server tests,
# environments, an example, and the pages of its documentation that a patch of rfcs/upstream changes. They come from one
# commit of huggingface/OpenEnv, in a git directory or checkout that the caller has, and lie in
# ~/.cache/errata/openenv-COMMIT (XDG_CACHE_HOME names another cache). Needs bash and git, and no set-up.
#
#   make openenv-source FROM=DIR            or scripts/openenv_source.sh DIR
#   scripts/openenv_source.sh --where       print that directory; status 69 and the reason where it is not there or
#                                           lacks something
#
# Blobs of other paths need not be there, so a partial clone will do. OPENENV_COMMIT names another commit.
set -euo pipefail
unset CDPATH GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY # of a hook, say: DIR alone names the repository

commit=${OPENENV_COMMIT:-385de5ebb8d08d51d000d7dfc19de5f3c6a9c215}
url=https://github.com/huggingface/OpenEnv
paths=(
    LICENSE
    tests/core/test_{production_mode_routes,simulation_mode_preserves_api,types_and_enums}.py
    envs/{chess,coding,connect4,echo,grid_world,maze,reasoning_gym,repl,snake,wildfire}_env
    envs/{dipg_safety,dm_control,unity}_env/client.py
    envs/tbench2_env/server/tbench2_env_environment.py examples/agent_world_model/example_usage.py
    docs/source/_toctree.yml docs/source/environments/{coding,repl}.md docs/source/reference/core.md
)

cache=${XDG_CACHE_HOME:-~/.cache}/errata
directory=$cache/openenv-${commit:0:12}

say() { printf 'openenv-source: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }
usage() {
    say "usage: make openenv-source FROM=DIR, where DIR is a git directory or checkout of $url" \
        "(git clone --bare --filter=blob:limit=1m $url DIR makes a small one)"
    exit 2
}

complete() {
    local path
    for path in "${paths[@]}"; do
        [ -e "$directory/$path" ] || return 1
    done
}

where() {
    printf '%s\n' "$directory"
    complete && return
    printf "OpenEnv's source is not here: make openenv-source FROM=DIR, a clone of huggingface/OpenEnv\n" >&2
    exit 69
}

# Prints the git directory of a repository whose top is DIR.
git_directory() {
    local from said
    from=$(cd "$1" 2>/dev/null && pwd -P) || stop "there is no directory $1"
    # No repository that happens to lie around DIR.
    if ! said=$(GIT_CEILING_DIRECTORIES=$(dirname "$from") git -C "$from" rev-parse --absolute-git-dir 2>&1); then
        stop "$1 is no git directory and no checkout (${said%%$'\n'*})"
    fi
    printf '%s\n' "$said"
}

export_from() {
    local from=$1 repository path mode blob
    repository=$(git_directory "$from")
    git --git-dir="$repository" cat-file -e "$commit^{commit}" 2>/dev/null ||
        stop "$from does not have commit $commit: git -C $from fetch $url $commit, then run this again"
    for path in "${paths[@]}"; do
        [ -n "$(git --git-dir="$repository" ls-tree "$commit" -- "$path")" ] ||
            stop "commit $commit of $from has no $path: nothing is exported"
    done

    mkdir -p "$cache"
    new=$(mktemp -d "$cache/.openenv-XXXXXX")
    trap 'rm -rf "$new"' EXIT
    # Not `git archive`, which also asks for the blobs of all other paths.
    git --git-dir="$repository" ls-tree -r "$commit" -- "${paths[@]}" >"$new/.entries"
    while read -r mode _ blob path; do
        [ "${path##*/}" != uv.lock ] || continue # most of the bytes, and nothing reads them
        mkdir -p "$(dirname "$new/$path")"
        git --git-dir="$repository" cat-file blob "$blob" >"$new/$path" ||
            stop "$from does not have $path: git -C $from fetch --refetch --no-filter $url $commit, then run this again"
        [ "$mode" != 100755 ] || chmod +x "$new/$path"
    done <"$new/.entries"
    rm "$new/.entries"
    chmod 755 "$new" # mktemp's is private
    rm -rf "$directory" # lacks something, or is not there
    mv -T "$new" "$directory" 2>/dev/null || complete || # another make was first
        stop "cannot move what was exported to $directory"
}

case ${1:-} in
    --where) where ;;
    '' | -*) usage ;;
    *)
        if complete; then
            say "nothing to do"
        else
            export_from "$1"
        fi
        printf 'OpenEnv %s: these are in %s\n' "${commit:0:12}" "$directory"
        printf '  %s\n' "${paths[@]}"
        ;;
esac
