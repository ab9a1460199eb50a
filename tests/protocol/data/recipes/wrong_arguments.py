"""Flags and values that a program does not take."""

from __future__ import annotations

from .model import Recipe, Site, row

CLI = {
    "cli.py": """import argparse

parser = argparse.ArgumentParser()
parser.add_argument("source")
parser.add_argument("--level", type=int, default=1)
parser.add_argument("--mode", choices=["fast", "full"])
print(parser.parse_args())
""",
    "strict.sh": '#!/bin/bash\nif [ $# -lt 2 ]; then\n  echo "usage: strict.sh SOURCE TARGET" >&2\n  exit 64\nfi\n',
}

RECIPES: list[Recipe] = [
    row(
        "python3 cli.py --level high notes.txt",
        "invalid_arguments",
        Site("high"),
        Site("--level"),
        Site("--level high"),
        files=CLI,
    ),
    row("python3 cli.py", "invalid_arguments", Site("python3 cli.py"), files=CLI),
    row(
        "python3 cli.py notes.txt --mode slow",
        "invalid_arguments",
        Site("slow"),
        Site("--mode"),
        Site("--mode slow"),
        files=CLI,
    ),
    row("python3 cli.py notes.txt --verbose", "invalid_arguments", Site("--verbose"), files=CLI),
    row("./strict.sh one", "invalid_arguments", Site("./strict.sh one"), files=CLI),
    row("rg --colour-mode notes", "invalid_arguments", Site("--colour-mode")),
    row("rg 'total(' shop/", "invalid_arguments", Site("total("), Site("'total('")),
    row(
        "grep -P '(?<=a' notes.txt",
        "invalid_arguments",
        Site("(?<=a"),
        Site("'(?<=a'"),
        also=("nonzero_exit", "syntax_error"),
    ),
    row("grep -E '[a-' notes.txt", "invalid_arguments", Site("[a-"), Site("'[a-'"), also=("syntax_error",)),
    row("grep --inclde='*.py' -rn total .", "invalid_arguments", Site("--inclde='*.py'"), Site("--inclde")),
    row("find . -type x", "invalid_arguments", Site("x"), Site("-type"), Site("-type x")),
    row(
        "find . -name '*.py' -exec cat {}",
        "invalid_arguments",
        Site("-exec"),
        Site("-exec cat {}"),
        Site("find . -name '*.py' -exec cat {}"),
    ),
    row("tail -n +x notes.txt", "invalid_arguments", Site("+x"), Site("-n +x")),
    row("date -d 'next blursday'", "invalid_arguments", Site("next blursday"), Site("'next blursday'")),
    row("chmod u+rwz notes.txt", "invalid_arguments", Site("u+rwz")),
    row("mkdir", "invalid_arguments", Site("mkdir")),
    row("cp -r shop", "invalid_arguments", Site("cp -r shop")),
    row("ln -s", "invalid_arguments", Site("ln -s")),
    row("cut -d, notes.txt", "invalid_arguments", Site("cut -d, notes.txt")),
    row("tr a-z", "invalid_arguments", Site("tr a-z")),
    row("seq 1 2 3 4", "invalid_arguments", Site("4")),
    row("xargs -P two echo < notes.txt", "invalid_arguments", Site("two"), Site("-P two"), Site("-P")),
    row("timeout soon ls", "invalid_arguments", Site("soon")),
    row("tar -cf", "invalid_arguments", Site("tar -cf"), Site("-cf")),
    row("curl --jsn '{}' http://127.0.0.1:9/", "invalid_arguments", Site("--jsn")),
    row("jq -z . config.json", "invalid_arguments", Site("-z")),
    row(
        "node --max-memory=100 index.js",
        "invalid_arguments",
        Site("--max-memory=100"),
        Site("--max-memory"),
        tree="web",
    ),
    row("make --jobz=3", "invalid_arguments", Site("--jobz=3"), Site("--jobz"), tree="c"),
    row("python3 -m http.server eighty", "invalid_arguments", Site("eighty")),
    row("pip install --no-such-option requests", "invalid_arguments", Site("--no-such-option")),
    row("pip instal requests", "invalid_arguments", Site("instal")),
    row("python3 -m venv", "invalid_arguments", Site("python3 -m venv")),
    row("kill -SIGFOO 1", "invalid_arguments", Site("-SIGFOO"), Site("SIGFOO")),
    row("bash --rcfiles x", "invalid_arguments", Site("--rcfiles")),
    row(
        "export 2FAST=1",
        "invalid_arguments",
        Site("2FAST=1"),
        Site("2FAST"),
        also=("nonzero_exit", "runtime_error"),
        ambiguous=True,
    ),
    row("cd shop tests", "invalid_arguments", Site("cd shop tests"), Site("tests"), also=("nonzero_exit",)),
    row("[ 3 -gt two ]", "invalid_arguments", Site("two"), also=("nonzero_exit",), ambiguous=True),
]
