"""Hard shapes: several errors at once, other directories, letters outside ASCII, long output, half-hidden causes."""

from __future__ import annotations

from .model import WHOLE, Recipe, Site, row

BREAK_TAX = "sed -i 's|// 100$|// 10|' shop/pricing.py"
CART_TOTAL = "tests/test_cart.py::TestCart::test_total"
SETUP_CLASS = {
    "test_cls.py": """import unittest


class RemoteTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise ConnectionAbortedError("no broker")

    def test_a(self):
        pass


class NumbersTest(unittest.TestCase):
    def test_even(self):
        for number in (2, 3):
            with self.subTest(number=number):
                self.assertEqual(number % 2, 0)
""",
}
NESTED = {
    "app/__init__.py": "",
    "app/core/__init__.py": "",
    "app/core/engine.py": "class Engine:\n    def start(self, fuel):\n        if fuel <= 0:\n"
    "            raise RuntimeError('no fuel')\n        return True\n",
    "app/tests/test_engine.py": "import pytest\n\nfrom app.core.engine import Engine\n\n\n"
    "@pytest.mark.parametrize('fuel', ['/tmp/a b', 0, -1.5])\ndef test_start(fuel):\n    assert Engine().start(fuel)\n",
}

RECIPES: list[Recipe] = [
    # letters outside ASCII before the span: spans count code points, not bytes
    row("echo 'größe: 3 µm' && cat größe.txt", "path_not_found", Site("größe.txt")),
    row("echo '✅ ready 🚀'; pyhton3 run.py", "command_not_found", Site("pyhton3")),
    row("mkdir -p données && cp données/entrée.csv out.csv", "path_not_found", Site("données/entrée.csv")),
    row(
        "python3 - <<'EOF'\n# café ☕\nname = 'Zoë'\nprint(name.lenght)\nEOF",
        "runtime_error",
        Site("print(name.lenght)", file="<stdin>", line=3),
    ),
    row("python3 -c 'print(“hello”)'", "syntax_error", Site("print(“hello”)", file="<string>", line=1)),
    row("echo '日本語' > 説明.txt && grep -n 英語 説明.txt", None),
    row("head -n五 notes.txt", "invalid_arguments", Site("五"), Site("-n五")),
    # several errors: precedence, then the last simple command that failed
    row("cat missing_a.txt; ls missing_b/", "path_not_found", Site("missing_b/")),
    row("cp notes.txt /etc/ ; cat nothing.txt", "permission_denied", Site("/etc/"), also=("path_not_found",)),
    row("ls /root/.ssh; frobnicate --all", "command_not_found", Site("frobnicate")),
    row(
        "python3 -c 'import nosuchmod' || cat fallback.txt",
        "import_error",
        Site("import nosuchmod", file="<string>", line=1),
    ),
    row(
        "pip install -q flask_x 2>/dev/null; python3 -c 'import flask_x'",
        "import_error",
        Site("import flask_x", file="<string>", line=1),
    ),
    row("git pull; python3 -m pytest -q tests", None, tree="shop"),
    row("grep -q zeta notes.txt; cat nothing.txt; echo done", None),
    row("for f in one.txt notes.txt two.txt; do wc -l $f; done", "path_not_found", Site("two.txt"), Site("one.txt")),
    row("make 2>&1 | grep error", None, tree="c", setup="sed -i 's/return 0;/return 0/' src/main.c"),
    # other directories
    row(
        "cd shop && python3 -m pytest -q ../tests/test_cart.py",
        "import_error",
        Site(file="tests/test_cart.py", at="from shop.cart"),
        Site(file="../tests/test_cart.py", at="from shop.cart", where="tests/test_cart.py"),
        setup=BREAK_TAX,
    ),
    row(
        "cd tests && PYTHONPATH=/workspace python3 -m pytest -q test_cart.py --rootdir=..",
        "test_failure",
        Site(test="test_cart.py::TestCart::test_total"),
        Site(test=CART_TOTAL),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest app -q",
        "test_failure",
        Site(file="app/core/engine.py", at="if fuel <= 0", test="app/tests/test_engine.py::test_start[/tmp/a b]"),
        Site(
            file="app/tests/test_engine.py", at="assert Engine()", test="app/tests/test_engine.py::test_start[/tmp/a b]"
        ),
        tree="none",
        files=NESTED,
    ),
    row(
        "python3 -m pytest -q app/tests --tb=no -k '0 or 1.5'",
        "test_failure",
        Site(test="app/tests/test_engine.py::test_start[0]"),
        tree="none",
        files=NESTED,
    ),
    row(
        "cd app && python3 -c 'from core.engine import Engine; Engine().start(0)'",
        "runtime_error",
        Site(file="app/core/engine.py", at="raise RuntimeError"),
        Site(file="core/engine.py", at="raise RuntimeError", where="app/core/engine.py"),
        tree="none",
        files=NESTED,
    ),
    row(
        "make -C native all",
        "build_error",
        Site(file="lib.c", line=2),
        Site(file="native/lib.c", line=2),
        tree="none",
        files={
            "native/Makefile": "all:\n\tgcc -c lib.c -o /tmp/lib.o\n",
            "native/lib.c": "int f(void) {\n    return undefined_thing;\n}\n",
        },
    ),
    row(
        "PYTHONPATH=src python3 -m tool.main",
        "runtime_error",
        Site(file="src/tool/main.py", at="1 / 0"),
        tree="none",
        files={"src/tool/__init__.py": "", "src/tool/main.py": "def run():\n    return 1 / 0\n\n\nrun()\n"},
    ),
    row("python3 /tmp/gen.py", "path_not_found", Site("/tmp/gen.py")),
    # more of test runners
    row(
        "python3 -m unittest test_cls.RemoteTest",
        "test_failure",
        Site(file="test_cls.py", at="raise ConnectionAbortedError"),
        files=SETUP_CLASS,
    ),
    row(
        "python3 -m unittest -v test_cls.NumbersTest",
        "test_failure",
        Site(file="test_cls.py", at="assertEqual", test="test_cls.NumbersTest.test_even"),
        files=SETUP_CLASS,
    ),
    row("python3 -m unittest tests.test_nothing", "import_error"),
    row(
        "python3 -m pytest -q tests/test_fail.py",
        "test_failure",
        Site(test="tests/test_fail.py::test_plain"),
        files={
            "tests/test_fail.py": "import pytest\n\n\ndef test_plain():\n"
            "    pytest.fail('backend said: No such file or directory', pytrace=False)\n"
        },
    ),
    row(
        "python3 -m pytest -q tests/test_stop.py",
        "runtime_error",
        files={"tests/test_stop.py": "def test_stops():\n    raise KeyboardInterrupt\n"},
        also=("test_failure", "nonzero_exit"),
        ambiguous=True,
    ),
    row("python3 -m pytest -q -p nosuchplugin tests", "import_error", Site("nosuchplugin")),
    row(
        "python3 -m pytest -q tests/test_log.py",
        "test_failure",
        Site(file="tests/test_log.py", at="assert False", test="tests/test_log.py::test_logs"),
        files={
            "tests/test_log.py": "def test_logs():\n    print('FAILED tests/other.py::test_x - boom')\n"
            "    print('other.c:3:4: error: expected ;')\n    assert False\n"
        },
    ),
    row(
        "python3 -m pytest -q --junitxml=/tmp/r.xml tests && echo fine",
        "test_failure",
        Site(file="tests/test_cart.py", at="cart.total() == 238", test=CART_TOTAL),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest -rf tests/test_pricing.py --tb=short -k discount",
        "test_failure",
        Site(file="tests/test_pricing.py", at="discount(200, 50) == 100", test="tests/test_pricing.py::test_discount"),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest -q tests --deselect tests/test_cart.py::TestCart::test_total 2>&1 | tail -2",
        "test_failure",
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest -q tests -k total --tb=auto -vv",
        "test_failure",
        Site(file="tests/test_cart.py", at="cart.total() == 238", test=CART_TOTAL),
        setup=BREAK_TAX,
    ),
    # long output with the cause in the middle
    row("seq 1 400 && cat nothing.txt && seq 1 5", "path_not_found", Site("nothing.txt")),
    row(
        "python3 -c \"\nimport sys\nfor n in range(300):\n    print('line', n)\nraise LookupError('late')\n\"",
        "runtime_error",
        Site("raise LookupError('late')", file="<string>", line=5),
    ),
    row("set -x; cd shop; python3 pricing.py; cat none.txt", "path_not_found", Site("none.txt")),
    # edits by a script
    row(
        "python3 replace.py shop/cart.py 'def totals' 'def total'",
        "runtime_error",
        Site(file="replace.py", at="raise ValueError"),
        files={
            "replace.py": "import sys\nfrom pathlib import Path\n\nname, old, new = sys.argv[1:]\n"
            "text = Path(name).read_text()\nif text.count(old) != 1:\n"
            "    raise ValueError(f'{old!r} occurs {text.count(old)} times')\n"
            "Path(name).write_text(text.replace(old, new))\n"
        },
    ),
    row(
        "sed -i 's/nothing_like_it/x/' shop/cart.py && git diff --no-index --exit-code shop/cart.py shop/cart.py", None
    ),
    row("perl -pi -e 's/alpha/ALPHA/' missing.txt", None),
    row("ed -s notes.txt <<< '1,3p'", "command_not_found", Site("ed")),
    row("awk '{ print > \"/etc/out\" }' notes.txt", "permission_denied", Site("/etc/out")),
    row("jq '.version = 4' config.json > /etc/config.json", "permission_denied", Site("/etc/config.json")),
    row(
        "cat config.json | python3 -c 'import json,sys; print(json.load(sys.stdin)[\"owner\"])'",
        "runtime_error",
        Site('import json,sys; print(json.load(sys.stdin)["owner"])', file="<string>", line=1),
    ),
    row("cat notes.txt | python3 -m json.tool", "syntax_error", Site(line=1)),
    row("echo '{\"a\": 1}' | jq '.a | keys'", "runtime_error", also=("nonzero_exit",)),
    row("xargs -a notes.txt cat", "path_not_found"),
    row("find . -name '*.txt' -exec nosuchtool {} \\;", None),
    row("trap 'exit 42' TERM; kill $$; sleep 1", "nonzero_exit", Site(WHOLE)),
    row("test 1 = 1 = 1", "invalid_arguments", Site("test 1 = 1 = 1"), also=("nonzero_exit",), ambiguous=True),
    row(
        "cd shop; python3 -c 'import sys; sys.exit(\"shop: nothing to sell\")' 2>&1",
        "nonzero_exit",
        Site(WHOLE),
        Site("python3 -c 'import sys; sys.exit(\"shop: nothing to sell\")' 2>&1"),
        Site("python3 -c 'import sys; sys.exit(\"shop: nothing to sell\")'"),
    ),
]
