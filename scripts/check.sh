#!/usr/bin/env bash
# Style, types, import rules and argument docs: ruff, mypy, tsc, import-linter and scripts/argument_docs.py, side by side;
# `make check` runs it. Exit status 1: one of them found something, or could not run.
#
# mypy takes most of the time of a first run. Its cache lies in the checkout, where a second one cannot change it in between;
# a new checkout begins with a copy of what the user's last run left in ~/.cache/errata/mypy.
set -uo pipefail
cd "$(dirname "$0")/.."

bin=.cache/venv/bin
cache=.cache/check
shared=${XDG_CACHE_HOME:-$HOME/.cache}/errata
mkdir -p $cache "$shared"

types() {
    $bin/mypy --no-error-summary --cache-dir $cache/mypy
    local status=$?
    MYPYPATH=server/errata_server/sandbox/launcher $bin/mypy --no-error-summary --config-file= --strict \
        --cache-dir $cache/mypy/launcher -m launcher -m fake_root || { echo "check: mypy of the launcher failed"; status=1; }
    return $status
}
# The viewer's modules are JavaScript with types in comments.
javascript() {
    $bin/python -I scripts/environments.py npm || return
    .cache/npm/node .cache/npm/node_modules/typescript/bin/tsc --project scripts/tsconfig.json --pretty false
}
style() {
    local status=0
    $bin/ruff check --quiet --output-format concise --cache-dir $cache/ruff . || { echo "check: ruff check failed"; status=1; }
    $bin/ruff format --quiet --check --cache-dir $cache/ruff . || { echo "check: ruff format failed (repair: $bin/ruff format)"; status=1; }
    $bin/lint-imports --no-logo --cache-dir $cache/imports >$cache/imports.out 2>&1 ||
        { cat $cache/imports.out; echo "check: lint-imports failed"; status=1; }
    $bin/python -I scripts/argument_docs.py || { echo "check: argument docs without a subject (scripts/argument_docs.py)"; status=1; }
    return $status
}

exec 9>$cache/lock
flock 9 # one run at a time in a checkout
exec 8>>"$shared/mypy.lock"
if [ ! -e $cache/mypy ]; then
    flock 8
    [ ! -e "$shared/mypy" ] || { cp -a "$shared/mypy" $cache/mypy.new && mv $cache/mypy.new $cache/mypy; }
    flock -u 8
fi

types >$cache/mypy.out 2>&1 8>&- 9>&- &
mypy=$!
javascript >$cache/tsc.out 2>&1 8>&- 9>&- &
tsc=$!
style 8>&- 9>&-
status=$?
wait $tsc || { status=1; cat $cache/tsc.out; echo "check: tsc failed"; }
wait $mypy || { status=1; echo "check: mypy failed" >>$cache/mypy.out; }
cat $cache/mypy.out

if [ -e $cache/mypy ] && [ -n "$(find $cache/mypy -newer "$shared/mypy.lock" -type f -print -quit)" ]; then
    flock 8
    rm -rf "$shared/mypy.new" && cp -a $cache/mypy "$shared/mypy.new" && rm -rf "$shared/mypy" && mv "$shared/mypy.new" "$shared/mypy"
    touch "$shared/mypy.lock"
    flock -u 8
fi
exit $status
