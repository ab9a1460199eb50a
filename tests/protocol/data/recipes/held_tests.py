"""Second recording, test runners: odd ids, all traceback styles, wrappers, other runners, cut output."""

from __future__ import annotations

from .model import Recipe, Site, row

AMOUNT = "tests/test_parsing.py::test_parse_amount"
RAISE = "raise ParseError"
WITHDRAW = "tests/test_models.py::TestAccount::test_withdraw"
SIX = "account.balance == 6"
SPACES = f"{AMOUNT}[2 000,00-2000.00]"


def led(
    command: str,
    kind: str | None,
    *sites: Site,
    tree: str = "ledger",
    files: dict[str, str] | None = None,
    setup: str = "",
    limit_s: float = 30,
    also: tuple[str, ...] = (),
    cwd: str = "/testbed",
) -> Recipe:
    """Build a recipe of the ledger tree, whose cwd is that of a SWE-bench repository."""
    return row(command, kind, *sites, tree=tree, files=files, setup=setup, limit_s=limit_s, also=also, cwd=cwd)


LOGGED = {
    "tests/test_logged.py": "import logging\n\n\ndef test_fast():\n    try:\n        import fast_json\n"
    "    except ImportError:\n        logging.exception('slow path')\n        fast_json = None\n    assert fast_json\n"
}
TEXTS = {
    "tests/test_texts.py": "def test_message():\n    shown = 'SyntaxError: invalid syntax (bad.py, line 3)'\n"
    "    assert shown == 'ModuleNotFoundError: No module named x'\n"
}
CALLS = {
    "tests/test_calls.py": "from unittest import mock\n\n\ndef test_called():\n    send = mock.Mock()\n    send('a')\n"
    "    send.assert_called_once_with('b')\n"
}
YAML_TEST = {
    "tests/test_config.py": "from ledger import config\n\n\ndef test_rates():\n"
    "    assert config.load('data/rates.yaml')['rates']['de'] == 19\n\n\ndef test_bad():\n"
    "    config.rates('data/bad.yaml')\n"
}
HELPED = {
    "tests/test_helped.py": "from helpers import same\n\n\ndef test_same():\n    same([1, 2], [1, 2])\n\n\n"
    "def test_other():\n    same({'a': 1}, {'a': 2})\n"
}
LOST_FIXTURE = {
    "tests/test_lost.py": "class TestStore:\n    def test_ready(self):\n        assert True\n\n"
    "    def test_read(self, store):\n        assert store.read()\n"
}
MARKED = {"tests/test_marked.py": "import pytest\n\n\n@pytest.mark.slow\ndef test_slow():\n    assert True\n"}
BROKEN_NAME = {"tests/test_named.py": "import pytest\n\nLIMIT = LIMITS['a']\n\n\ndef test_named():\n    assert LIMIT\n"}
HOOK = {
    "tests/conftest.py": "def pytest_collection_modifyitems(config, items):\n    for item in items:\n"
    "        item.order = config.orders[item.name]\n"
}
HANG = {
    "tests/test_hang.py": "import time\n\n\ndef test_first():\n    assert True\n\n\ndef test_waits():\n"
    "    time.sleep(60)\n"
}
TOX = {
    "tox.sh": '#!/bin/bash\necho "py311: commands[0]> pytest $*"\npython3 -m pytest "$@"\ncode=$?\n'
    'if [ $code -ne 0 ]; then\n  echo "py311: exit $code (0.52 seconds) /testbed> pytest $*"\n'
    '  echo "  py311: FAIL code $code (0.61=setup[0.09]+cmd[0.52] seconds)"\n'
    '  echo "  evaluation failed :( (0.66 seconds)"\nfi\nexit $code\n'
}
REPORT_TEST = {"tests/test_report.py": "from ledger.report import table\n\n\ndef test_table():\n    assert table([])\n"}
CHAIN = {
    "tests/test_chain.py": "from ledger import config\n\n\ndef test_none(tmp_path):\n    path = tmp_path / 'x.yaml'\n"
    "    path.write_text('a: 1')\n    config.rates(path)\n"
}
SUBTESTS = {
    "test_sub.py": "import unittest\n\n\nclass Sizes(unittest.TestCase):\n    def test_sizes(self):\n"
    '        """Every size is small."""\n        for size in ("s", "m", "x - l"):\n'
    "            with self.subTest(size=size):\n                self.assertLess(len(size), 2)\n"
}

RECIPES: list[Recipe] = [
    led("pytest -q tests/test_parsing.py", "test_failure", Site(file="ledger/parsing.py", at=RAISE, test=SPACES)),
    led(
        "pytest tests/test_parsing.py --tb=short -k 'amount and not 000'",
        "test_failure",
        Site(file="ledger/parsing.py", at=RAISE, test=f"{AMOUNT}[[3]-3]"),
    ),
    led(
        "pytest tests/test_parsing.py --tb=line -q",
        "test_failure",
        Site(file="ledger/parsing.py", at=RAISE, test=SPACES),
    ),
    led(
        "pytest --tb=native tests/test_parsing.py -x",
        "test_failure",
        Site(file="ledger/parsing.py", at=RAISE, test=SPACES),
    ),
    led(
        "pytest --tb=long -l -vv tests/test_parsing.py::test_parse_amount -k 'x and y'",
        "test_failure",
        Site(file="ledger/parsing.py", at=RAISE, test=f"{AMOUNT}[x - y-0]"),
    ),
    led(
        "python3 -m pytest 'tests/test_parsing.py::test_parse_amount[a::b-0]' --no-header -q",
        "test_failure",
        Site(file="ledger/parsing.py", at=RAISE, test=f"{AMOUNT}[a::b-0]"),
    ),
    led("pytest tests/test_parsing.py --tb=no -rN -q", "test_failure"),
    led("python3 -m pytest -p no:terminal tests/test_parsing.py", "nonzero_exit", also=("test_failure",)),
    led("pytest tests/test_many.py 2>&1 | tail -30", "test_failure"),
    led(
        "pytest tests/test_many.py -q",
        "test_failure",
        Site(file="tests/test_many.py", at="assert square < 9", test="tests/test_many.py::test_square[3]"),
    ),
    led("pytest -p no:cacheprovider tests -x --ff 2>&1", "invalid_arguments", Site("--ff")),
    led(
        "pytest tests -x --ff 2>&1",
        "test_failure",
        Site(file="tests/test_many.py", at="assert square < 9", test="tests/test_many.py::test_square[3]"),
    ),
    led(
        "pytest -q tests/test_many.py > /tmp/out.log 2>&1; rc=$?; head -25 /tmp/out.log; exit $rc",
        "test_failure",
        also=("nonzero_exit",),
    ),
    led(
        "pytest tests/test_models.py > /tmp/log 2>&1 || (tail -5 /tmp/log; exit 1)",
        "test_failure",
        Site(test=WITHDRAW),
    ),
    led(
        "cd tests && pytest -q test_models.py",
        "test_failure",
        Site(file="tests/test_models.py", at=SIX, test="test_models.py::TestAccount::test_withdraw"),
        Site(file="tests/test_models.py", at=SIX, test=WITHDRAW),
        Site(file="test_models.py", at=SIX, test=WITHDRAW, where="tests/test_models.py"),
        Site(
            file="test_models.py",
            at=SIX,
            test="test_models.py::TestAccount::test_withdraw",
            where="tests/test_models.py",
        ),
    ),
    led(
        "python3 -m pytest tests/test_models.py && git add -A && git commit -m 'models work'",
        "test_failure",
        Site(file="tests/test_models.py", at=SIX, test=WITHDRAW),
    ),
    led(
        'for t in tests/test_ok.py tests/test_models.py; do pytest -q "$t" || exit 1; done',
        "test_failure",
        Site(file="tests/test_models.py", at=SIX, test=WITHDRAW),
    ),
    led(
        "source /dev/null; cd /testbed && PYTHONPATH=. pytest -rA --color=no tests/test_models.py 2>&1 | cat; "
        "exit ${PIPESTATUS[0]}",
        "test_failure",
        Site(file="tests/test_models.py", at=SIX, test=WITHDRAW),
    ),
    led(
        "make test 2>&1 | tee build.log; exit ${PIPESTATUS[0]}",
        "test_failure",
        Site(file="tests/test_models.py", at=SIX, test=WITHDRAW),
    ),
    led(
        "./tox.sh -q tests/test_models.py",
        "test_failure",
        Site(file="tests/test_models.py", at=SIX, test=WITHDRAW),
        files=TOX,
    ),
    led(
        "pytest -q tests/test_logged.py",
        "test_failure",
        Site(file="tests/test_logged.py", at="assert fast_json", test="tests/test_logged.py::test_fast"),
        files=LOGGED,
    ),
    led(
        "pytest -q tests/test_texts.py --tb=short",
        "test_failure",
        Site(file="tests/test_texts.py", at="assert shown", test="tests/test_texts.py::test_message"),
        files=TEXTS,
    ),
    led(
        "pytest tests/test_calls.py -vv",
        "test_failure",
        Site(file="tests/test_calls.py", at="assert_called_once_with", test="tests/test_calls.py::test_called"),
        files=CALLS,
    ),
    led(
        "pytest tests/test_config.py",
        "test_failure",
        Site(file="ledger/config.py", at="yaml.safe_load", test="tests/test_config.py::test_bad"),
        files=YAML_TEST,
    ),
    led(
        "pytest tests/test_config.py --tb=native -q 2>&1 | tee /tmp/t.log",
        "test_failure",
        Site(file="ledger/config.py", at="yaml.safe_load", test="tests/test_config.py::test_bad"),
        files=YAML_TEST,
    ),
    led(
        "pytest -q tests/test_helped.py --tb=short",
        "test_failure",
        Site(file="tests/helpers.py", at="assert left == right", test="tests/test_helped.py::test_other"),
        files=HELPED,
    ),
    led(
        "pytest -v tests/test_lost.py",
        "test_failure",
        Site(file="tests/test_lost.py", at="def test_read(", test="tests/test_lost.py::TestStore::test_read"),
        files=LOST_FIXTURE,
    ),
    led(
        "pytest --strict-markers -q tests/test_marked.py",
        "test_failure",
        Site(test="tests/test_marked.py"),  # pytest says no line
        files=MARKED,
    ),
    led(
        "pytest tests/test_ok.py tests/test_named.py",
        "test_failure",
        Site(file="tests/test_named.py", at="LIMITS['a']", test="tests/test_named.py"),
        Site(file="tests/test_named.py", at="LIMITS['a']"),
        files=BROKEN_NAME,
    ),
    led(
        "pytest -q tests/test_ok.py -v",
        "runtime_error",
        Site(file="tests/conftest.py", at="config.orders"),
        files=HOOK,
        also=("nonzero_exit", "test_failure"),
    ),
    led(
        "pytest tests/test_report.py --tb=short -x",
        "import_error",
        Site(file="ledger/report.py", at="from tabulate"),
        files=REPORT_TEST,
    ),
    led(
        "pytest tests/test_report.py -q --tb=native",
        "import_error",
        Site(file="ledger/report.py", at="from tabulate"),
        files=REPORT_TEST,
    ),
    led(
        "pytest -q tests/test_chain.py",
        "test_failure",
        Site(file="ledger/config.py", at="raise LookupError", test="tests/test_chain.py::test_none"),
        files=CHAIN,
    ),
    led("pytest tests -k", "invalid_arguments", Site("-k")),
    led("pytest --maxfail=abc tests", "invalid_arguments", Site("--maxfail=abc"), Site("abc")),
    led(
        "pytest tests/test_parsing.py -k 'amount and (day'",
        "invalid_arguments",
        Site("amount and (day"),
        Site("'amount and (day'"),
        Site("-k 'amount and (day'"),
        also=("syntax_error",),
    ),
    led(
        "pytest tests/test_models.py::TestAccount::test_transfer tests/test_parsing.py",
        "path_not_found",
        Site("tests/test_models.py::TestAccount::test_transfer"),
    ),
    led(
        "pytest tests/test_ok.py tests/unit/test_core.py -q 2>&1 | tail -3; exit ${PIPESTATUS[0]}",
        "nonzero_exit",  # the lines that name the path are cut off
        also=("path_not_found", "invalid_arguments"),
    ),
    led(
        "timeout 3 pytest -v tests/test_hang.py", "timeout", Site("timeout 3 pytest -v tests/test_hang.py"), files=HANG
    ),
    led(
        "cd tests; pytest -s test_hang.py --durations=3",
        "timeout",
        Site("cd tests; pytest -s test_hang.py --durations=3"),
        files=HANG,
        limit_s=4,
    ),
    led(
        "python3 -m pytest --doctest-glob='*.rst' docs/usage.rst",
        "test_failure",
        Site(file="docs/usage.rst", at=">>> parse_amount", test="docs/usage.rst::usage.rst"),
    ),
    led(
        "PYTHONPATH=. python3 -m doctest docs/usage.rst",
        "test_failure",
        Site(file="docs/usage.rst", at=">>> parse_amount"),
        also=("nonzero_exit",),
    ),
    led("python3 -m coverage run -m pytest tests/test_ok.py", "import_error"),
    # django and unittest
    led(
        "./runtests.py forms_tests",
        "permission_denied",
        Site("./runtests.py"),
        tree="django",
    ),
    led(
        "python3 runtests.py forms_tests --parallel=1",
        "test_failure",
        Site(file="forms_tests/tests.py", at='"b "), "b ")', test="forms_tests.tests.FieldTests.test_required"),
        tree="django",
    ),
    led(
        "python3 runtests.py -v forms_tests model_tests 2>&1",
        "test_failure",
        Site(file="shop/fields.py", at="json.loads", test="model_tests.tests.SaveTests.test_broken_text"),
        Site(file="forms_tests/tests.py", at='"b "), "b ")', test="forms_tests.tests.FieldTests.test_required"),
        tree="django",
    ),
    led(
        "cd /testbed && python3 runtests.py setup_tests",
        "test_failure",
        Site(file="setup_tests/tests.py", at="yaml.safe_load", test="setup_tests.tests.LoadTests.test_loaded"),
        tree="django",
    ),
    led(
        "python3 runtests.py admin_tests",
        "import_error",
        tree="django",
        also=("runtime_error",),
    ),
    led(
        "python3 -m unittest -f test_sub",
        "test_failure",
        Site(file="test_sub.py", at="assertLess", test="test_sub.Sizes.test_sizes"),
        tree="django",
        files=SUBTESTS,
    ),
    led("python3 runtests.py forms_tests 2>&1 | tail -12", None, tree="django"),
    led("python3 -m unittest test_sub 2>&1 | grep -A3 FAIL", None, tree="django", files=SUBTESTS),
]
