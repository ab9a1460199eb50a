"""Python, node and ruby programs that do not compile, do not import, or raise."""

from __future__ import annotations

from .model import Recipe, Site, row

REPORT = {
    "report.py": """import json
import sys


class ReportError(Exception):
    pass


def read(path):
    with open(path) as stream:
        return json.load(stream)


def column(rows, name):
    try:
        return [row[name] for row in rows]
    except KeyError as error:
        raise ReportError(f"no column {name}") from error


def main():
    rows = read(sys.argv[1])
    print(sum(column(rows, sys.argv[2])))


if __name__ == "__main__":
    main()
""",
    "rows.json": '[{"a": 1}, {"a": 2}]\n',
    "broken.json": '[{"a": 1},\n {"a": 2,}]\n',
    "scalar.json": "7\n",
}

RECIPES: list[Recipe] = [
    row("python3 report.py rows.json b", "runtime_error", Site(file="report.py", at="raise ReportError"), files=REPORT),
    row(
        "python3 report.py broken.json a",
        "runtime_error",
        Site(file="report.py", at="return json.load(stream)"),
        files=REPORT,
    ),
    row(
        "python3 report.py scalar.json a 2>&1",
        "runtime_error",
        Site(file="report.py", at="return [row[name]"),
        files=REPORT,
    ),
    row("python3 report.py rows.json", "runtime_error", Site(file="report.py", at="sys.argv[2]"), files=REPORT),
    row("python3 report.py row.json a", "path_not_found", Site("row.json"), files=REPORT),
    row(
        "cd shop && python3 cart.py",
        "import_error",
        Site(file="cart.py", at="from shop.pricing", where="shop/cart.py"),
        Site(file="shop/cart.py", at="from shop.pricing"),
    ),
    row(
        "python3 - <<'PY'\nfrom shop.cart import Cart\n\ncart = Cart()\ncart.add('pen', 100)\n"
        "print(cart.total('us'))\nPY",
        "runtime_error",
        Site(file="shop/pricing.py", at="rate = RATES[country]"),
    ),
    row(
        "cat > /tmp/try.py <<'PY'\nimport shop.cart\nPY\npython3 /tmp/try.py",
        "import_error",
        Site(file="/tmp/try.py", line=1),
    ),
    row(
        "python3 <<'PY'\nitems = [1, 2, 3]\nfor i in range(4):\n    print(items[i])\nPY",
        "runtime_error",
        Site("print(items[i])", file="<stdin>", line=3),
    ),
    row(
        "python3 -c \"\nimport json\ndata = json.load(open('config.json'))\nprint(data['nmae'])\n\"",
        "runtime_error",
        Site("print(data['nmae'])", file="<string>", line=4),
    ),
    row(
        "python3 -c 'import sys; print(sys.argv[1])'",
        "runtime_error",
        Site("import sys; print(sys.argv[1])", file="<string>", line=1),
    ),
    row(
        'python3 -c "from shop.pricing import discount; print(discount(100, 150))"',
        "runtime_error",
        Site(file="shop/pricing.py", at="raise ValueError"),
    ),
    row(
        "python3 -c 'import shop.cart as c; c.Cart().ad(1)'",
        "runtime_error",
        Site("import shop.cart as c; c.Cart().ad(1)", file="<string>", line=1),
    ),
    row(
        "python3 parse_config.py",
        "runtime_error",
        Site(file="parse_config.py", at="yaml.safe_load"),
        files={"parse_config.py": "import yaml\n\nTEXT = 'a: [1, 2'\nprint(yaml.safe_load(TEXT))\n"},
    ),
    row(
        "python3 group.py",
        "runtime_error",
        Site(file="group.py", at="raise ExceptionGroup"),
        Site(file="group.py", at="raise ValueError"),
        files={
            "group.py": "def one():\n    raise ValueError('first')\n\n\nerrors = []\ntry:\n    one()\n"
            "except ValueError as error:\n    errors.append(error)\nraise ExceptionGroup('several', errors)\n"
        },
    ),
    row(
        "python3 handler.py",
        "runtime_error",
        Site(file="handler.py", at="return int(text or None)"),
        files={
            "handler.py": "def parse(text):\n    try:\n        return int(text)\n    except ValueError:\n"
            "        return fallback('')\n\n\ndef fallback(text):\n    return int(text or None)\n\n\nparse('x')\n"
        },
    ),
    row(
        "python3 -m shop.worker",
        "runtime_error",
        Site(file="shop/worker.py", at="return queue[0]"),
        files={
            "shop/worker.py": "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n\n\n"
            "def first(queue):\n    return queue[0]\n\n\nwith ThreadPoolExecutor() as pool:\n"
            "    print(pool.submit(first, []).result())\n"
        },
    ),
    row(
        "python3 aio.py",
        "runtime_error",
        Site(file="aio.py", at="raise asyncio.TimeoutError"),
        files={
            "aio.py": "import asyncio\n\n\nasync def fetch():\n    await asyncio.sleep(0)\n"
            "    raise asyncio.TimeoutError\n\n\nasyncio.run(fetch())\n"
        },
    ),
    row(
        "python3 deep.py 2>&1 | tail -4; exit ${PIPESTATUS[0]}",
        "runtime_error",
        also=("nonzero_exit",),  # the pipe cut the traceback's head and its frames off
        files={"deep.py": "def walk(node):\n    return walk(node)\n\n\nwalk(1)\n"},
    ),
    row(
        "python3 -c \"import subprocess; subprocess.run(['git', 'frobnicate'], check=True, capture_output=True)\"",
        "runtime_error",
        Site(
            "import subprocess; subprocess.run(['git', 'frobnicate'], check=True, capture_output=True)",
            file="<string>",
            line=1,
        ),
    ),
    row(
        "python3 -c \"import subprocess; subprocess.check_output(['pdflatex', 'x.tex'])\"",
        "path_not_found",
        Site("pdflatex"),
        Site("'pdflatex'"),
        also=("command_not_found",),
    ),
    row(
        "python3 -c \"raise SystemExit('nothing to do: no input given')\"",
        "nonzero_exit",
        Site("python3 -c \"raise SystemExit('nothing to do: no input given')\""),
    ),
    row('python3 -c "import os; os.kill(os.getpid(), 11)"', "runtime_error"),
    row("python3 -c 'import os; os._exit(7)'", "nonzero_exit", Site("python3 -c 'import os; os._exit(7)'")),
    row(
        "python3 -X faulthandler -c 'import ctypes; ctypes.string_at(0)'",
        "runtime_error",
        Site("import ctypes; ctypes.string_at(0)", file="<string>", line=1),
        Site(file="<string>", line=1),
    ),
    row(
        "python3 ask.py < /dev/null",
        "runtime_error",
        Site(file="ask.py", at="input("),
        files={"ask.py": "name = input('name? ')\nprint(name)\n"},
    ),
    row(
        "python3 enc.py",
        "runtime_error",
        Site(file="enc.py", at="decode"),
        files={"enc.py": "data = b'caf\\xe9'\nprint(data.decode('utf-8'))\n"},
    ),
    row(
        'PYTHONWARNINGS=error python3 -c "\nimport datetime\nimport imp\n"',
        "runtime_error",
        Site("import imp", file="<string>", line=3),
    ),
    # does not compile
    row(
        "python3 f_string.py",
        "syntax_error",
        Site(file="f_string.py", line=2),
        files={"f_string.py": "name = 'x'\nprint(f'{name')\n"},
    ),
    row(
        "python3 main.py",
        "syntax_error",
        Site(file="settings/base.py", line=2),
        files={
            "main.py": "from settings import base\n\nprint(base.NAME)\n",
            "settings/__init__.py": "",
            "settings/base.py": "NAME = 'x'\nPORTS = [1, 2\nDEBUG = True\n",
        },
    ),
    row(
        "python3 -c 'import shop.cart'",
        "syntax_error",
        Site(file="shop/cart.py", at="self.items.append"),
        setup="sed -i '9s/^        /    /' shop/cart.py",
    ),
    row(
        "python3 -m compileall -q shop",
        "syntax_error",
        Site(file="shop/pricing.py", line=8),
        setup="sed -i '8s/return/retrun/' shop/pricing.py",
    ),
    row(
        "python3 -c 'for i in range(3): print(i) else: print(0)'",
        "syntax_error",
        Site("for i in range(3): print(i) else: print(0)", file="<string>", line=1),
    ),
    row("python3 <<'EOF'\ndef f():\nprint('x')\nEOF", "syntax_error", Site("print('x')", file="<stdin>", line=2)),
    row("python3 -c \"\nx = 'it's'\n\"", "syntax_error", Site("x = 'it's'", file="<string>", line=2)),
    row(
        "python3 - <<EOF\nprint('price: $5')\nvalue = {'a': 1,, 'b': 2}\nEOF",
        "syntax_error",
        Site("value = {'a': 1,, 'b': 2}", file="<stdin>", line=2),
    ),
    row(
        "python3 -c 'import ast; ast.parse(open(\"notes.py\").read())'",
        "syntax_error",
        files={"notes.py": "a = 1\nb = = 2\n"},
    ),
    row(
        "python3 -m json.tool broken.json",
        "syntax_error",
        Site("broken.json", line=2),
        Site("broken.json", file="broken.json", line=2),
        files=REPORT,
    ),
    row(
        "cat broken.json | jq .",
        "syntax_error",
        Site(line=2),
        Site("broken.json", line=2),
        Site("jq .", line=2),
        files=REPORT,
    ),
    row("jq '.tags[] | {name: }' config.json", "syntax_error"),
    row("jq '.[0] | .a.b' rows.json", "runtime_error", files=REPORT, also=("nonzero_exit",)),
    row("node -e 'const a = {b: 1; console.log(a)'", "syntax_error"),
    row(
        "node index.js",
        "syntax_error",
        Site(file="lib/sum.js", line=2),
        tree="web",
        setup="sed -i '2s/);$/;/' lib/sum.js",
    ),
    row(
        "node config.mjs",
        "syntax_error",
        Site(file="config.mjs", line=1),
        tree="web",
        files={
            "config.mjs": "import { missing } from './lib/names.mjs';\nconsole.log(missing);\n",
            "lib/names.mjs": "export const present = 1;\n",
        },
        also=("import_error",),
    ),
    row(
        "node use_import.js",
        "syntax_error",
        Site(file="use_import.js", line=1),
        tree="web",
        files={"use_import.js": "import fs from 'fs';\nconsole.log(fs);\n"},
    ),
    row("node -p 'JSON.parse(\"{a:1}\")'", "syntax_error", also=("runtime_error",)),
    row(
        "xmllint --noout page.xml",
        "syntax_error",
        Site(file="page.xml", line=3),
        files={"page.xml": "<page>\n  <p>text\n</page>\n"},
    ),
    row(
        "ruby -c tool.rb",
        "syntax_error",
        Site(file="tool.rb", line=4),
        files={"tool.rb": "def a\n  if true\n    puts 1\nend\n"},
    ),
    row(
        "perl -c tool.pl",
        "syntax_error",
        Site(file="tool.pl", line=3),
        files={"tool.pl": "use strict;\nmy $x = 1\nprint $x;\n"},
    ),
    row("sqlite3 /tmp/shop.db 'CREATE TABLE items (id INTEGER, name TEXT,);'", "syntax_error"),
    row(
        "sqlite3 /tmp/shop.db 'SELECT * FROM orders;'",
        "nonzero_exit",
        Site("sqlite3 /tmp/shop.db 'SELECT * FROM orders;'"),
        also=("runtime_error", "syntax_error"),
        ambiguous=True,
    ),
    # does not import
    row("node index.js", "import_error", Site(file="index.js", line=1), tree="web", setup="mv lib/sum.js lib/total.js"),
    row(
        "node server.mjs",
        "import_error",
        Site(file="server.mjs"),
        tree="web",
        files={"server.mjs": "import express from 'express';\nexpress();\n"},
    ),
    row("node srv.js", "import_error", Site("srv.js"), tree="web"),
    row("node -e \"require('lodash').chunk([1], 1)\"", "import_error"),
    row("python3 -m shop.api", "import_error", Site("shop.api")),
    row("python3 -m shop", "import_error", Site("shop")),
    row(
        "python3 -c 'from shop import basket'", "import_error", Site("from shop import basket", file="<string>", line=1)
    ),
    row(
        "python3 circular_a.py",
        "import_error",
        Site(file="circular_a.py", at="from circular_b import B"),
        files={
            "circular_a.py": "from circular_b import B\n\nA = 1\n",
            "circular_b.py": "from circular_a import A\n\nB = 2\n",
        },
    ),
    row(
        "python3 run.py",
        "import_error",
        Site(file="plugins/loader.py", at="importlib.import_module"),
        files={
            "run.py": "from plugins import loader\n\nloader.load('plugins.csv_reader')\n",
            "plugins/__init__.py": "",
            "plugins/loader.py": "import importlib\n\n\ndef load(name):\n    return importlib.import_module(name)\n",
        },
    ),
    row("perl -MJSON::XS -e 'print encode_json([1])'", "import_error"),
    row("ruby -e 'require \"nokogiri\"'", "import_error", also=("runtime_error", "path_not_found")),
    # other runtimes
    row(
        "node boom.js",
        "runtime_error",
        Site(file="boom.js", at="user.name"),
        tree="web",
        files={"boom.js": "function greet(user) {\n  return 'hi ' + user.name;\n}\n\nconsole.log(greet());\n"},
    ),
    row(
        "node reject.js",
        "runtime_error",
        Site(file="reject.js", at="throw new Error"),
        tree="web",
        files={"reject.js": "async function main() {\n  throw new Error('no config');\n}\n\nmain();\n"},
    ),
    row("node -e 'undefinedFunction()'", "runtime_error"),
    row(
        "ruby calc.rb",
        "runtime_error",
        Site(file="calc.rb", line=2),
        files={"calc.rb": "def div(a, b)\n  a / b\nend\n\nputs div(1, 0)\n"},
    ),
    row(
        "perl sum.pl",
        "runtime_error",
        Site(file="sum.pl", line=3),
        files={"sum.pl": "use strict;\nuse warnings;\nsub total { die 'empty list' unless @_; }\ntotal();\n"},
    ),
    row("awk 'BEGIN { print 1 / 0 }'", "runtime_error", also=("nonzero_exit",)),
]
