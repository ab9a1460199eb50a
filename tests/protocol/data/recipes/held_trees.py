"""The trees of the second recording: a ledger package, a C++ project and a mixed bag of scripts."""

from __future__ import annotations

from .model import Tree

LEDGER = {
    "conftest.py": "",
    "pyproject.toml": '[project]\nname = "ledger"\nversion = "0.3"\n\n[tool.pytest.ini_options]\n'
    'markers = ["fast: runs in a moment"]\n',
    "ledger/__init__.py": "",
    "ledger/parsing.py": '''"""Amounts and days as people write them."""

from datetime import date
from decimal import Decimal, InvalidOperation


class ParseError(ValueError):
    """The text is no amount."""


def parse_amount(text):
    try:
        return Decimal(text.replace(",", "."))
    except InvalidOperation as error:
        raise ParseError(f"no amount: {text!r}") from error


def parse_day(text):
    day, month, year = text.split(".")
    return date(int(year), int(month), int(day))


def parse_line(line):
    name, amount, day = line.split(";")
    return name.strip(), parse_amount(amount.strip()), parse_day(day.strip())
''',
    "ledger/models.py": '''"""Accounts and the ledger that holds them."""

from ledger.parsing import parse_line


class InsufficientFunds(Exception):
    """More is asked for than there is."""


class Account:
    def __init__(self, name, balance=0):
        self.name = name
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise InsufficientFunds(self.name, amount)
        self.balance -= amount + 1


class Ledger:
    def __init__(self):
        self.accounts = {}

    def open(self, name):
        self.accounts[name] = Account(name)
        return self.accounts[name]

    def post(self, line):
        name, amount, _ = parse_line(line)
        self.accounts[name].deposit(amount)
''',
    "ledger/config.py": '''"""Settings in YAML."""

import yaml


def load(path):
    with open(path) as handle:
        return yaml.safe_load(handle)


def rates(path):
    try:
        return load(path)["rates"]
    except KeyError:
        raise LookupError(f"{path} sets no rates")
''',
    "ledger/report.py": "import json\n\nfrom tabulate import tabulate\n\n\ndef table(rows):\n"
    "    return tabulate(rows)\n",
    "ledger/legacy.py": 'import sys\n\n\ndef show(rows):\n    for row in rows:\n        print "row", row\n',
    "ledger/cli.py": '''"""Command line."""

import argparse

from .models import Ledger


def main():
    parser = argparse.ArgumentParser(prog="ledger")
    commands = parser.add_subparsers(dest="command", required=True)
    post = commands.add_parser("post")
    post.add_argument("name")
    post.add_argument("amount", type=float)
    post.add_argument("--format", choices=["text", "json"], default="text")
    listing = commands.add_parser("list")
    listing.add_argument("--limit", type=int, default=3)
    options = parser.parse_args()
    ledger = Ledger()
    if options.command == "list":
        for number in range(options.limit):
            print("account", number)
        return
    ledger.accounts[options.name].deposit(options.amount)


if __name__ == "__main__":
    main()
''',
    "tests/helpers.py": "def same(left, right):\n    __tracebackhide__ = False\n    assert left == right\n",
    "tests/test_parsing.py": """import pytest

from ledger.parsing import parse_amount, parse_day


@pytest.mark.parametrize(
    "text, expected",
    [("1,50", "1.50"), ("2 000,00", "2000.00"), ("[3]", "3"), ("a::b", "0"), ("x - y", "0")],
)
def test_parse_amount(text, expected):
    assert str(parse_amount(text)) == expected


def test_parse_day():
    assert parse_day("01.02.2024").month == 2
""",
    "tests/test_models.py": """import pytest

from ledger.models import Account, InsufficientFunds, Ledger


class TestAccount:
    def test_deposit(self):
        account = Account("cash")
        account.deposit(5)
        assert account.balance == 5

    def test_withdraw(self):
        account = Account("cash", 10)
        account.withdraw(4)
        assert account.balance == 6

    def test_overdraw(self):
        with pytest.raises(InsufficientFunds):
            Account("cash").withdraw(1)


class TestLedger:
    def test_open(self):
        assert Ledger().open("cash").balance == 0
""",
    "tests/test_ok.py": "import pytest\n\n\n@pytest.mark.fast\ndef test_fine():\n    assert 1 + 1 == 2\n",
    "tests/test_many.py": "import pytest\n\n\n@pytest.mark.parametrize('n', range(60))\ndef test_square(n):\n"
    "    square = n * n\n    assert square < 9, f'{n} is too large'\n",
    "Makefile": "PYTEST = python3 -m pytest -q\n\ntest:\n\t$(PYTEST) tests/test_models.py\n\ncheck:\n"
    "\tpython3 scripts/ratio.py\n\ndocs:\n\tsphinx-build docs docs/_build\n\n"
    "lint:\n\t@echo linting\n\t@exit 3\n\nhtml:\n\tsphinx-build docs out\n",
    "scripts/ratio.py": 'import sys\n\n\ndef ratio(done, total):\n    return done / total\n\n\nprint("start")\n'
    "print(ratio(len(sys.argv), 0))\n",
    "data/rates.yaml": "rates:\n  de: 19\n  fr: 20\n",
    "data/bad.yaml": "rates:\n  de: [19\n  fr: 20\n",
    "data/people.json": '{"users": [{"name": "Ann", "age": 31}, {"name": "Bo", "age": 29}]}\n',
    "data/rows.txt": "ann 3 7\nbo 4 0\ncy 5 9\n",
    "docs/usage.rst": "Usage\n=====\n\nAmounts:\n\n>>> from ledger.parsing import parse_amount\n"
    ">>> parse_amount('1,5')\n"
    "Decimal('1.50')\n",
    "docs/trouble.md": "# Trouble\n\n`ModuleNotFoundError: No module named 'ledger'`: install it.\n"
    "`bash: ledger: command not found`: mend PATH.\n\n    E   SyntaxError: invalid syntax\n"
    "    FAILED tests/test_x.py::test_y\n"
    "    ===== 3 failed, 2 passed in 0.50s =====\n",
    "run.log": "============ test session starts ============\ntests/test_a.py F\n"
    "FAILED tests/test_a.py::test_a - KeyError\n============ 1 failed in 0.02s ============\n",
    "empty.txt": "",
    "my notes.txt": "one\ntwo words\nthree\n",
}

DJANGO = {
    "runtests.py": """import sys
import unittest

names = [name for name in sys.argv[1:] if not name.startswith("-")] or ["forms_tests", "model_tests"]
print("Testing against Shop installed in '/testbed/shop' with up to 2 processes")
print(f"Found {len(names)} test module(s).")
print("System check identified no issues (0 silenced).", flush=True)
suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromName(f"{name}.tests") for name in names)
result = unittest.TextTestRunner(verbosity=2 if "-v" in sys.argv else 1).run(suite)
print("Destroying test database for alias 'default'...", file=sys.stderr)
sys.exit(not result.wasSuccessful())
""",
    "shop/__init__.py": "",
    "shop/fields.py": """import json


class Field:
    def clean(self, value):
        if value in (None, ""):
            raise ValueError("This field is required.")
        return self.convert(value)

    def convert(self, value):
        return value.strip()


class JSONField(Field):
    def convert(self, value):
        return json.loads(value)
""",
    "forms_tests/__init__.py": "",
    "forms_tests/tests.py": '''import unittest

from shop.fields import Field, JSONField


class FieldTests(unittest.TestCase):
    def test_strips(self):
        self.assertEqual(Field().clean(" a "), "a")

    def test_required(self):
        """
        An empty value is refused (#1234).
        """
        self.assertRaisesMessage = None
        self.assertEqual(Field().clean("b "), "b ")


class JSONTests(unittest.TestCase):
    def test_convert(self):
        self.assertEqual(JSONField().clean('{"a": 1}'), {"a": 1})
''',
    "model_tests/__init__.py": "",
    "model_tests/tests.py": """import unittest

from shop.fields import JSONField


class SaveTests(unittest.TestCase):
    def test_plain(self):
        self.assertTrue(JSONField())

    def test_broken_text(self):
        JSONField().clean("{'a': 1}")
""",
    "setup_tests/__init__.py": "",
    "setup_tests/tests.py": """import unittest

import yaml


class LoadTests(unittest.TestCase):
    def setUp(self):
        try:
            self.data = {}["fixtures"]
        except KeyError:
            self.data = yaml.safe_load("a: [1")

    def test_loaded(self):
        self.assertEqual(self.data, {})
""",
}

CPP = {
    "CMakeLists.txt": "cmake_minimum_required(VERSION 3.16)\nproject(shapes CXX)\ninclude_directories(include)\n"
    "add_executable(shapes src/main.cpp src/circle.cpp src/square.cpp)\n",
    "Makefile": "CXXFLAGS = -std=c++17 -Wall -Iinclude\nOBJS = src/main.o src/circle.o src/square.o\n\n"
    "shapes: $(OBJS)\n\t$(CXX) -o $@ $(OBJS)\n\n%.o: %.cpp include/shape.hpp\n\t$(CXX) $(CXXFLAGS) -c $< -o $@\n\n"
    "check: shapes\n\t./shapes | diff - expected.txt\n\nclean:\n\trm -f shapes $(OBJS)\n",
    "expected.txt": "circle 3\nsquare 5\n",
    "include/shape.hpp": "#pragma once\n#include <string>\n\nstruct Shape {\n  virtual ~Shape() = default;\n"
    "  virtual std::string name() const = 0;\n  virtual int area() const = 0;\n};\n\nShape *circle(int r);\n"
    "Shape *square(int a);\n",
    "src/main.cpp": '#include "shape.hpp"\n#include <iostream>\n\nstatic void show(const Shape &shape) {\n'
    '  std::cout << shape.name() << " " << shape.area() << "\\n";\n}\n\nint main() {\n  show(*circle(1));\n'
    "  show(*square(2));\n  return 0;\n}\n",
    "src/circle.cpp": '#include "shape.hpp"\n\nstruct Circle : Shape {\n  int r;\n  explicit Circle(int r) : r(r) {}\n'
    '  std::string name() const override { return "circle"; }\n'
    "  int area() const override { return 3 * r * r; }\n};\n\n"
    "Shape *circle(int r) { return new Circle(r); }\n",
    "src/square.cpp": '#include "shape.hpp"\n\nstruct Square : Shape {\n  int a;\n  explicit Square(int a) : a(a) {}\n'
    '  std::string name() const override { return "square"; }\n  int area() const override { return a * a; }\n};\n\n'
    "Shape *square(int a) { return new Square(a); }\n",
}

TOOLS = {
    "words.txt": "delta 4\nalpha 1\ngamma 3\n",
    "ledger.csv": "name,amount\nann,3\nbo,x\n",
    "scripts/release.sh": '#!/bin/bash\nset -u\n\nstamp() {\n  echo "release $1"\n  echo "channel $CHANNEL"\n}\n'
    "\nstamp 1.0\n",
    "scripts/pack.sh": "#!/bin/bash\nset -e\necho packing\ncd dist\ntar czf ../out.tgz .\n",
    "scripts/fetch.sh": "#!/bin/sh\necho fetching\nhttpie https://example.com\n",
    "scripts/walk.sh": "#!/bin/bash\nfor f in *.txt; do\n  echo $f\n  if [ -s $f ]; then\n    echo full\ndone\n",
    "scripts/env.rb": "#!/usr/bin/env jruby\nputs 1\n",
    "scripts/report.pl": "use strict;\nuse warnings;\n\nmy %totals = (ann => 3);\nmy $entry;\n\nsub show {\n"
    "    my ($name) = @_;\n    return $entry->amount($name);\n}\n\nprint show('ann'), \"\\n\";\n",
    "scripts/tally.rb": "def tally(rows)\n  rows.map do |row|\n    row.fetch(:amount)\n  end\nend\n\n"
    "puts tally([{ amount: 1 }, { total: 2 }]).sum\n",
    "lib/total.js": "exports.total = function total(rows) {\n  let sum = 0;\n  for (const row of rows) {\n"
    "    sum += row.amount.value;\n  }\n  return sum;\n};\n",
    "app.js": "const { total } = require('./lib/total');\n\nconsole.log('starting');\n"
    "console.log(total([{ amount: 3 }, {}]));\n",
    "load.js": "const fs = require('fs');\n\nconst text = fs.readFileSync('data/settings.json', 'utf8');\n"
    "console.log(text);\n",
}

REPO_SETUP = """set -e
git init -q .
printf 'one\\ntwo\\nthree\\nfour\\nfive\\n' > poem.txt
printf 'def area(w, h):\\n    return w * h\\n' > geo.py
git add . && git commit -qm 'first'
git checkout -qb topic
sed -i 's/three/3 on topic/' poem.txt
git commit -qam 'topic edit'
git checkout -q main
sed -i 's/three/three on main/' poem.txt
git commit -qam 'main edit'
git tag v2
"""

HELD_TREES: dict[str, Tree] = {
    "ledger": Tree(files=LEDGER),
    "django": Tree(files=DJANGO),
    "cpp": Tree(files=CPP),
    "tools": Tree(files=TOOLS),
    "poems": Tree(setup=REPO_SETUP),
}
