"""Second recording, nothing to mark: exit 1 that answers, errors shown as data, failures that are provided for."""

from __future__ import annotations

from .held_tests import led
from .model import Recipe


def quiet(
    command: str,
    *,
    tree: str = "ledger",
    setup: str = "",
    files: dict[str, str] | None = None,
    also: tuple[str, ...] = (),
) -> Recipe:
    """Build a recipe whose answer is no marker."""
    return led(command, None, tree=tree, setup=setup, files=files, also=also)


RECIPES: list[Recipe] = [
    quiet("pytest -q tests/test_ok.py 2>&1 | grep -i error"),
    quiet("pytest -q tests/test_ok.py -m slow"),
    quiet("pytest -rs tests/test_ok.py -k 'nothing or none'"),
    quiet("pytest --co -q tests/test_many.py | tail -3"),
    quiet("pytest -q tests/test_models.py --deselect tests/test_models.py::TestAccount::test_withdraw"),
    quiet("[[ $(pytest -q tests/test_ok.py | tail -1) == *failed* ]]"),
    quiet("cat docs/trouble.md"),
    quiet("cat run.log  # what pytest said yesterday"),
    quiet("echo 'pytest: 3 failed, 2 passed in 1.20s'"),
    quiet("python3 show.py", files={"show.py": "print('FAILED tests/a.py::b')\nprint('== 2 failed in 0.10s ==')\n"}),
    quiet("cat > tests/test_new.py <<'EOF'\nimport nosuchmodule\n\ndef test_new():\n    assert False\nEOF"),
    quiet("grep -rn 'InvalidOperation' ledger/ | grep -v import | grep -v except"),
    quiet("rg -l ModuleNotFoundError --glob '*.md'"),
    quiet("rg -q 'TODO|FIXME' ledger tests"),
    quiet("grep -c . empty.txt"),
    quiet("gzip -c run.log > run.log.gz; zcat run.log.gz | grep FATAL"),
    quiet("ls -1 ledger | grep -E '\\.(pyi|so)$'"),
    quiet("! grep -q parse_amount ledger/parsing.py", also=("nonzero_exit",)),
    quiet("test -s empty.txt || [ -d out ]"),
    quiet("diff <(python3 -m ledger.cli list) my\\ notes.txt"),
    quiet("diff -u <(sed -n 1,2p run.log) <(sed -n 2,3p run.log)"),
    quiet("cmp --silent run.log docs/trouble.md; echo $?"),
    quiet("grep -q 'xyz' run.log; [ $? -eq 2 ]"),
    quiet("jq -e '.users[0].age == 30' data/people.json"),
    quiet("read -t 1 answer < empty.txt"),
    quiet("if ! command -v cargo >/dev/null 2>&1; then echo 'no cargo'; fi"),
    quiet("type -t activate_env"),
    quiet("pgrep -f 'celery worker' || echo 'not running'"),
    quiet("curl -sS --max-time 2 https://ping.example.com || true"),
    quiet("timeout 1 tail -f run.log || true"),
    quiet("COUNT=; if [ $COUNT -eq 3 ]; then echo three; fi; echo done"),
    quiet("nice -n -5 echo ok"),
    quiet('perl -e \'warn "disk failure imminent\\n"; print "ok\\n"\''),
    quiet('node -e \'process.on("uncaughtException", e => console.log("caught", e.stack)); null.x\''),
    quiet("ruby -e 'begin; raise \"boom\"; rescue => e; puts e.full_message; end'"),
    quiet("sqlite3 :memory: 'select 1/0'; sqlite3 :memory: 'selec 1' 2>&1 | head -1"),
    quiet("sleep 30 & kill $!; wait $! 2>/dev/null; echo ended"),
    quiet("(exit 7) || echo recovered"),
    quiet('out=$(cat nothing.txt 2>&1); echo "$out"'),
    quiet("head -c 70M /dev/zero > /tmp/blob; ls /tmp"),
    quiet("find / -name 'ledger*.cfg' 2>/dev/null | head -1; echo \"exit ${PIPESTATUS[0]}\""),
    quiet('for f in ledger/*.py; do python3 -m py_compile $f || echo "$f does not compile"; done'),
    quiet("git grep -n Decimal64 -- '*.py'", tree="poems"),
    quiet("git config --get-regexp '^remote\\.'", tree="poems"),
    quiet("git rev-parse --verify --quiet origin/trunk", tree="poems"),
    quiet("git diff --quiet main topic && echo same", tree="poems", also=("nonzero_exit",)),
    quiet("git log -p -1 | grep '^+.*raise'", tree="poems"),
    quiet("git merge topic >/dev/null 2>&1; git diff --name-only --diff-filter=U", tree="poems"),
    quiet("git diff --no-index --name-only geo.py poem.txt", tree="poems"),
    quiet("git merge topic -m x || git merge --abort", tree="poems"),
]
