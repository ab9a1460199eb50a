"""Runs of pytest and unittest that fail, in collection, in set-up, in a test, or behind a pipe."""

from __future__ import annotations

from .model import Recipe, Site, row

BREAK_TAX = "sed -i 's|// 100$|// 10|' shop/pricing.py"
TAX_100 = "tests/test_pricing.py::test_tax[100-19]"
TAX_ASSERT = 'tax(cents, "de") == expected'
CART_TOTAL = "tests/test_cart.py::TestCart::test_total"

FIXTURE_ERROR = {
    "tests/conftest.py": """import pytest


@pytest.fixture
def database():
    raise RuntimeError("database is not running")


@pytest.fixture
def temp_cart():
    yield []
    raise OSError("teardown went wrong")
""",
    "tests/test_db.py": """def test_query(database):
    assert database.query() == 1


def test_clean(temp_cart):
    assert temp_cart == []
""",
}

UNIT = {
    "test_units.py": """import unittest

from shop import pricing


class PricingTest(unittest.TestCase):
    def setUp(self):
        self.rate = pricing.RATES["de"]

    def test_discount_range(self):
        with self.assertRaises(ValueError):
            pricing.discount(100, 90)

    def test_tax(self):
        self.assertEqual(pricing.tax(100, "de"), self.rate)

    def test_unknown_country(self):
        pricing.tax(100, "xx")


if __name__ == "__main__":
    unittest.main()
""",
}

DOCTEST = {
    "shop/text.py": '''def shout(text):
    """Return text in capitals.

    >>> shout("a")
    'A'
    >>> shout("b")
    'b'
    """
    return text.upper()
''',
}

RECIPES: list[Recipe] = [
    row(
        "python3 -m pytest tests/",
        "test_failure",
        Site(file="tests/test_cart.py", at="cart.total() == 238", test=CART_TOTAL),
        setup=BREAK_TAX,
    ),
    row(
        "cd /workspace && python3 -m pytest tests/test_pricing.py -v 2>&1",
        "test_failure",
        Site(file="tests/test_pricing.py", at=TAX_ASSERT, test=TAX_100),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest -x --tb=line tests/test_pricing.py",
        "test_failure",
        Site(file="tests/test_pricing.py", at=TAX_ASSERT, test=TAX_100),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest --tb=native -q tests/test_pricing.py -k '200'",
        "test_failure",
        Site(file="tests/test_pricing.py", at=TAX_ASSERT, test="tests/test_pricing.py::test_tax[200-38]"),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest --no-header --tb=no -q 2>&1 | tail -n 8",
        "test_failure",
        Site(test=CART_TOTAL),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest tests -q 2>&1 | tail -1",
        "test_failure",
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest tests/test_cart.py -q || true",
        "test_failure",
        Site(file="tests/test_cart.py", at="cart.total() == 238", test=CART_TOTAL),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest tests/test_cart.py --tb=short 2>&1 | cat",
        "test_failure",
        Site(file="tests/test_cart.py", at="cart.total() == 238", test=CART_TOTAL),
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest tests 2>&1 | grep -E 'passed|failed'",
        "test_failure",
        setup=BREAK_TAX,
    ),
    row(
        "python3 -m pytest -q tests > /tmp/out.txt 2>&1; tail -1 /tmp/out.txt",
        "test_failure",
        setup=BREAK_TAX,
    ),
    row(
        "pytest -q --rootdir=/workspace -p no:cacheprovider tests 2>&1 | tee /tmp/run.log | tail -n 3",
        "test_failure",  # what is left of the output says only that collection had errors
        setup="mv shop store",
    ),
    row(
        "python3 -m pytest -q tests > /tmp/out.txt 2>&1; grep -c FAILED /tmp/out.txt",
        None,
        setup=BREAK_TAX,
        also=("test_failure",),
        ambiguous=True,
    ),
    row(
        "python3 -m pytest tests -q 2>&1 | head -5",
        None,
        setup=BREAK_TAX,
        ambiguous=True,  # the run fails, but the lines that say so are cut off
        also=("test_failure",),
    ),
    row(
        'python3 -m pytest -q tests; echo "exit code: $?"',
        "test_failure",
        Site(file="tests/test_cart.py", at="cart.total() == 238", test=CART_TOTAL),
        setup=BREAK_TAX,
        ambiguous=True,  # a failing run, but its summary is not the last line, as the contract wants
    ),
    row(
        "python3 -m pytest -q tests/test_db.py::test_query",
        "test_failure",
        Site(file="tests/conftest.py", at="database is not running", test="tests/test_db.py::test_query"),
        files=FIXTURE_ERROR,
    ),
    row(
        "python3 -m pytest -q tests/test_db.py -k clean",
        "test_failure",
        Site(file="tests/conftest.py", at="teardown went wrong", test="tests/test_db.py::test_clean"),
        files=FIXTURE_ERROR,
    ),
    row(
        "pytest tests/test_db.py -rA --color=no",
        "test_failure",
        Site(file="tests/conftest.py", at="database is not running", test="tests/test_db.py::test_query"),
        files=FIXTURE_ERROR,
    ),
    row(
        "python3 -m pytest tests/test_cart.py -q --color=yes",
        "test_failure",
        Site(file="tests/test_cart.py", at="cart.total() == 238", test=CART_TOTAL),
        setup=BREAK_TAX,
    ),
    row(
        "pytest -q tests",
        "import_error",
        Site(file="tests/test_cart.py", at="from shop.cart import Cart"),
        setup="mv shop store",
    ),
    row(
        "cd /workspace/tests && PYTHONPATH=.. python3 -m pytest -q test_pricing.py",
        "import_error",
        Site(file="tests/test_pricing.py", at="from shop.pricing import"),
        Site(file="test_pricing.py", at="from shop.pricing import", where="tests/test_pricing.py"),
        setup="sed -i 's/def discount/def reduce_by/' shop/pricing.py",
    ),
    row(
        "python3 -m pytest tests/test_cart.py --tb=short",
        "import_error",
        Site(file="shop/cart.py", at="from shop.pricing import discount, vat"),
        setup="sed -i '1s/tax/vat/' shop/cart.py",
    ),
    row(
        "python3 -m pytest -q",
        "syntax_error",
        Site(file="shop/pricing.py", at="def tax(cents, country)"),
        setup="sed -i 's/country):/country)/' shop/pricing.py",
    ),
    row(
        "python3 -m pytest tests/test_pricing.py",
        "syntax_error",
        Site(file="tests/test_pricing.py", at="for i in range(3)"),
        setup="printf 'for i in range(3)\\n    pass\\n' >> tests/test_pricing.py",
    ),
    row(
        "python3 -m pytest tests -q",
        "import_error",
        Site(file="tests/conftest.py", at="import sqlalchemy"),
        files={"tests/conftest.py": "import os\nimport sqlalchemy\n\nENGINE = sqlalchemy.create_engine('sqlite://')\n"},
    ),
    row(
        "python3 -m pytest tests",
        "syntax_error",
        Site(file="tests/conftest.py", line=2),
        files={"tests/conftest.py": "import os\nif os.name == 'posix'\n    print(1)\n"},
    ),
    row(
        "python3 -m pytest -q tests/test_collect.py",
        "test_failure",
        Site(file="tests/test_collect.py", at='SETTINGS["url"]', test="tests/test_collect.py"),
        Site(file="tests/test_collect.py", at='SETTINGS["url"]'),
        files={"tests/test_collect.py": 'SETTINGS = {}\nURL = SETTINGS["url"]\n\n\ndef test_url():\n    assert URL\n'},
    ),
    row(
        "python3 -m pytest --doctest-modules shop/text.py -q",
        "test_failure",
        Site(file="shop/text.py", line=6, test="shop/text.py::shop.text.shout"),
        Site(file="shop/text.py", line=7, test="shop/text.py::shop.text.shout"),
        files=DOCTEST,
    ),
    row(
        "python3 -m pytest -q -p no:cacheprovider tests/test_warn.py -W error::DeprecationWarning",
        "test_failure",
        Site(file="tests/test_warn.py", at="warnings.warn", test="tests/test_warn.py::test_warns"),
        files={
            "tests/test_warn.py": "import warnings\n\n\ndef old():\n"
            '    warnings.warn("old() goes away", DeprecationWarning)\n\n\ndef test_warns():\n    old()\n'
        },
    ),
    row(
        "python3 -m pytest -q tests/test_raise.py",
        "test_failure",
        Site(file="shop/pricing.py", at="rate = RATES[country]", test="tests/test_raise.py::test_chain"),
        Site(file="tests/test_raise.py", at="tax(100, 'us')", test="tests/test_raise.py::test_chain"),
        files={
            "tests/test_raise.py": "from shop.pricing import tax\n\n\ndef test_chain():\n    tax(100, 'us')\n\n\n"
            "def test_second():\n    raise RuntimeError('second')\n"
        },
    ),
    row(
        "python3 -m pytest -q tests/test_files.py",
        "test_failure",
        Site(file="tests/test_files.py", at="Path('fixtures/none.json')", test="tests/test_files.py::test_reads"),
        files={
            "tests/test_files.py": "from pathlib import Path\n\n\ndef test_reads():\n"
            "    assert Path('fixtures/none.json').read_text()\n"
        },
    ),
    row(
        "python3 -m pytest -q tests/test_lazy.py",
        "import_error",
        Site(file="tests/test_lazy.py", at="import pandas"),
        files={"tests/test_lazy.py": "def test_frame():\n    import pandas\n\n    assert pandas.DataFrame\n"},
        also=("test_failure",),
    ),
    row(
        "python3 -m pytest -q tests/test_xfail.py",
        "test_failure",
        Site(test="tests/test_xfail.py::test_known"),
        files={
            "tests/test_xfail.py": "import pytest\n\n\n@pytest.mark.xfail(strict=True, reason='bug 12')\n"
            "def test_known():\n    assert True\n"
        },
    ),
    row(
        "python3 -m pytest -q tests/test_par.py --maxfail=1",
        "test_failure",
        Site(
            file="tests/test_par.py", at="assert a + b == c", test="tests/test_par.py::TestSum::test_sum[two and two]"
        ),
        files={
            "tests/test_par.py": "import pytest\n\n\nclass TestSum:\n"
            "    @pytest.mark.parametrize('a, b, c', [(1, 1, 2), (2, 2, 5)], ids=['one and one', 'two and two'])\n"
            "    def test_sum(self, a, b, c):\n        assert a + b == c\n"
        },
    ),
    row(
        "python3 -m pytest -q tests/test_exit.py",
        "test_failure",
        Site(file="tests/test_exit.py", at="sys.exit(3)", test="tests/test_exit.py::test_leaves"),
        files={"tests/test_exit.py": "import sys\n\n\ndef test_leaves():\n    sys.exit(3)\n"},
    ),
    row(
        "python3 -m unittest test_units",
        "test_failure",
        Site(file="shop/pricing.py", at="rate = RATES[country]", test="test_units.PricingTest.test_unknown_country"),
        Site(file="test_units.py", at='pricing.tax(100, "xx")', test="test_units.PricingTest.test_unknown_country"),
        Site(file="test_units.py", at="assertRaises", test="test_units.PricingTest.test_discount_range"),
        files=UNIT,
    ),
    row(
        "python3 -m unittest -v test_units.PricingTest.test_discount_range 2>&1 | tail -15; exit ${PIPESTATUS[0]}",
        "test_failure",
        Site(file="test_units.py", at="assertRaises", test="test_units.PricingTest.test_discount_range"),
        files=UNIT,
    ),
    row(
        "python3 test_units.py -f PricingTest.test_unknown_country",
        "test_failure",
        Site(file="shop/pricing.py", at="rate = RATES[country]", test="__main__.PricingTest.test_unknown_country"),
        files=UNIT,
    ),
    row(
        "python3 -m unittest discover -s tests -p 'test_p*.py'",
        "import_error",
        Site(file="tests/test_pandas.py", at="import pandas"),
        files={"tests/test_pandas.py": "import unittest\n\nimport pandas as pd\n"},
        setup="rm tests/test_pricing.py",
    ),
    row(
        "python3 -m unittest test_units.PricingTest.test_nothing",
        "test_failure",
        Site(test="test_units.PricingTest.test_nothing"),
        Site(test="unittest.loader._FailedTest.test_nothing"),
        files=UNIT,
        ambiguous=True,  # an ERROR of the loader; an AttributeError that names no test that exists
    ),
    row(
        "python3 -m doctest shop/text.py",
        "test_failure",
        Site(file="shop/text.py", line=6),
        files=DOCTEST,
        also=("nonzero_exit",),  # the contract names pytest and unittest only
    ),
    row(
        "python3 -m pytest tests/test_cart.py::TestCart::test_totals",
        "path_not_found",
        Site("tests/test_cart.py::TestCart::test_totals"),
    ),
    row("python3 -m pytest test/ -q", "path_not_found", Site("test/")),
    row(
        "python3 -m pytest tests -q --cov=shop --cov-report=term",
        "invalid_arguments",
        Site("--cov=shop"),
        Site("--cov=shop --cov-report=term"),
        Site("--cov-report=term"),
    ),
    row("python3 -m pytest -n 4 tests", "invalid_arguments", Site("-n"), Site("-n 4")),
    row(
        "python3 -m pytest -q -m 'slow and' tests",
        "invalid_arguments",
        Site("slow and"),
        Site("'slow and'"),
        Site("-m 'slow and'"),
        also=("syntax_error",),
    ),
    row(
        "node test.js",
        "runtime_error",
        Site(file="test.js", at="assert.strictEqual"),
        tree="web",
        files={
            "test.js": "const assert = require('assert');\nconst sum = require('./lib/sum');\n\n"
            "assert.strictEqual(sum([1, 2]), 4);\n"
        },
    ),
    row(
        "node --test test/",
        "nonzero_exit",
        Site("node --test test/"),
        tree="web",
        files={
            "test/sum.test.js": "const test = require('node:test');\nconst assert = require('assert');\n"
            "test('adds', () => { assert.strictEqual(1 + 1, 3); });\n"
        },
        ambiguous=True,  # a test run, but of a runner that the contract does not name
        also=("test_failure", "runtime_error"),
    ),
]
