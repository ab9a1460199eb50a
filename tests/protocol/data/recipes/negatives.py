"""Commands after which there is nothing to mark, however their output looks."""

from __future__ import annotations

from .model import Recipe, row


def quiet(
    command: str,
    *,
    tree: str = "shop",
    files: dict[str, str] | None = None,
    setup: str = "",
    also: tuple[str, ...] = (),
    ambiguous: bool = False,
) -> Recipe:
    """Build a recipe whose answer is no marker."""
    cwd = "/testbed" if tree == "repo" else "/workspace"
    return row(command, None, tree=tree, files=files, setup=setup, also=also, ambiguous=ambiguous, cwd=cwd)


RECIPES: list[Recipe] = [
    # exit 1 that is an answer
    quiet("grep -rn 'class Order' shop/"),
    quiet("grep -E 'delta|epsilon' notes.txt README.md"),
    quiet("rg --type py 'async def' ."),
    quiet("grep -c TODO shop/cart.py"),
    quiet("cat shop/cart.py | grep -n import_module"),
    quiet("git log --oneline | grep -i hotfix", tree="repo"),
    quiet("ps aux | grep -v grep | grep gunicorn"),
    quiet("cd shop && grep -q refund cart.py"),
    quiet("python3 -c 'print(1)' | grep 2"),
    quiet("diff -r shop tests"),
    quiet("diff <(sort notes.txt) <(sort README.md)"),
    quiet("diff -q notes.txt config.json"),
    quiet("cmp notes.txt README.md"),
    quiet("git diff --exit-code", tree="repo", setup="echo six >> poem.txt"),
    quiet("git diff --quiet -- poem.txt", tree="repo", setup="echo six >> poem.txt"),
    quiet("git diff --no-index --stat geo.py poem.txt", tree="repo"),
    quiet("git grep -c perimeter", tree="repo"),
    quiet("git check-ignore -v geo.py", tree="repo"),
    quiet("git rev-parse -q --verify refs/heads/develop", tree="repo"),
    quiet("git show-ref -q refs/tags/v9", tree="repo"),
    quiet("git config --get remote.origin.url", tree="repo"),
    quiet("git config core.hookspath", tree="repo"),
    quiet("git merge-base --is-ancestor feature main", tree="repo"),
    quiet("test -d node_modules"),
    quiet("test -x shop/cart.py"),
    quiet('[ "$(wc -l < notes.txt)" -gt 100 ]'),
    quiet("[[ -f setup.py || -f setup.cfg ]]"),
    quiet("(( $(grep -c alpha notes.txt) > 3 ))"),
    quiet("cd shop && [ -e missing.py ]"),
    quiet("[ -f Dockerfile ] && echo 'has docker'", also=("nonzero_exit",)),
    quiet("for f in notes.txt README.md; do grep -q zeta $f; done"),
    quiet("for d in build dist; do [ -d $d ]; done"),
    quiet("expr 3 - 3"),
    quiet("command -v docker"),
    quiet("type -P cargo"),
    quiet("which black isort ruff"),
    quiet("type poetry"),
    quiet("pgrep -x celery"),
    quiet("jq -e '.missing' config.json"),
    quiet("jq -e '.tags | index(\"z\") != null' config.json"),
    quiet("python3 -m pytest -q -k nothing_like_it tests"),
    quiet("python3 -m pytest tests/helpers.py", setup="echo 'x = 1' > tests/helpers.py"),
    quiet("find . -name '*.rs' | xargs grep -l unsafe", also=("nonzero_exit",), ambiguous=True),
    quiet("grep -q alpha notes.txt && ! grep -q beta notes.txt", also=("nonzero_exit",), ambiguous=True),
    quiet("cat missing.cfg 2>/dev/null | grep key"),
    # exit 0 with alarming text
    quiet("cat old_run.log"),
    quiet("tail -n 1 old_run.log"),
    quiet("grep -n FAILED old_run.log"),
    quiet("grep -rn 'Traceback' --include='*.log' . | head"),
    quiet("sed -n '/ERROR/p' server.log"),
    quiet("awk '/FATAL/ {print $0}' server.log"),
    quiet("grep -c ERROR server.log"),
    quiet("cat server.log | sort | uniq -c | sort -rn | head -3"),
    quiet("cp old_run.log /tmp/pytest_output.txt && tail -1 /tmp/pytest_output.txt"),
    quiet("echo 'bash: foo: command not found' > trace.txt; cat trace.txt"),
    quiet("printf 'make: *** [all] Error 2\\n' | tee build.log"),
    quiet("python3 -c \"print('No such file or directory')\""),
    quiet(
        "python3 try_all.py",
        files={
            "try_all.py": "import logging\n\nlogging.basicConfig()\ntry:\n    open('missing.ini')\n"
            "except OSError:\n    logging.exception('using defaults')\nprint('ready')\n"
        },
    ),
    quiet("python3 -c \"import sys; print('fatal: could not read config', file=sys.stderr)\""),
    quiet(
        "git log --format=%s -3",
        tree="repo",
        setup="git commit -q --allow-empty -m 'fix: CONFLICT (content) message, patch does not apply'",
    ),
    quiet("git diff", tree="repo", setup="printf 'SyntaxError: invalid syntax\\n' >> poem.txt"),
    quiet("git status --short --branch", tree="repo", setup="echo x > 'error: denied.txt'"),
    quiet("git merge-tree $(git merge-base main feature) main feature | head -20", tree="repo"),
    quiet("python3 -m pytest -q tests"),
    quiet("python3 -m pytest -v --tb=short 2>&1 | tail -5"),
    quiet(
        "python3 -m pytest -rA -q tests/test_mixed.py",
        files={
            "tests/test_mixed.py": "import pytest\n\n\n@pytest.mark.xfail(reason='known')\ndef test_known():\n"
            "    assert 0\n\n\n@pytest.mark.skip(reason='3 failed once')\ndef test_skipped():\n    assert 0\n\n\n"
            "def test_prints():\n    print('FAILED tests/x.py::test_y - 2 failed')\n"
        },
    ),
    quiet(
        "python3 -m pytest -q tests/test_warns.py",
        files={"tests/test_warns.py": "import warnings\n\n\ndef test_warns():\n    warnings.warn('1 error ahead')\n"},
    ),
    quiet(
        "python3 -m unittest -v test_ok",
        files={
            "test_ok.py": "import unittest\n\n\nclass ErrorTest(unittest.TestCase):\n"
            "    def test_error_is_raised(self):\n        with self.assertRaises(ValueError):\n            int('x')\n"
        },
    ),
    quiet("python3 -m pytest --collect-only -q"),
    quiet(
        "gcc -Wall -Wextra -Iinclude -c src/main.c -o /tmp/main.o && echo built",
        tree="c",
        setup="sed -i '4a\\    int unused_error;' src/main.c",
    ),
    quiet("make && make -q", tree="c"),
    quiet("make -n clean", tree="c"),
    quiet("make && ./build/app", tree="c"),
    quiet("python3 -W default -c \"import imp; print('ok')\""),
    quiet("python3 -c 'import sys; sys.exit(None)'"),
    quiet("node -e \"console.error('Error: not really'); process.emitWarning('deprecated')\"", tree="web"),
    quiet("node index.js && npm --version 2>/dev/null; true", tree="web"),
    quiet("perl -we 'my $x; print \"a\" . $x'"),
    quiet("ls nothing_here; echo continuing"),
    quiet("rm build/*.o 2>/dev/null || true"),
    quiet("false || true"),
    quiet("cd /nope 2>/dev/null || cd /workspace; pwd"),
    quiet("mkdir -p build && rm -rf build && test ! -d build && echo gone"),
    quiet("if grep -q gamma notes.txt; then echo found; else echo missing; exit 1; fi"),
    quiet("python3 -m json.tool config.json | head -3"),
    quiet("cat > fix.py <<'EOF'\nraise SystemExit('ERROR: not run')\nEOF\nwc -l fix.py"),
    quiet("curl --version | head -1; timeout 3 true"),
    quiet("set -o pipefail; yes error | head -3 || [ $? -eq 141 ]"),
    quiet("sed -i 's/nowhere/x/' notes.txt && git diff --no-index --quiet notes.txt notes.txt"),
    quiet("rg -c total shop || echo none"),
    quiet("xargs -a notes.txt -I{} echo 'Permission denied: {}'"),
    quiet("trap 'echo cleanup' EXIT; echo work"),
    quiet("head -c 200000 /dev/zero | tr '\\0' 'E' | tail -c 20"),
]
