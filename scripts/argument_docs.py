"""Finds argument docs that are fragments: an argument's doc is a whole noun phrase with its subject.

    python -I scripts/argument_docs.py [PATH ...]

"Of the ask." says nothing to a reader who meets it alone; "Tag of the question that was voted on." does. A doc that
begins with a preposition, a question word or an adverb has left its subject out. The paths are packages or files; by
default those of `PACKAGES`. Each finding is a line, ``FILE:LINE: NAME: TEXT``; exit status 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "server/errata_environment",
    "trainer_adapter/errata_trainer",
    "envs/terminal_env",
    "envs/swe_bench_lite_env",
    "envs/errata_redteam",
)
"""What is checked by default."""
SECTIONS = ("Args:", "Attributes:")
FRAGMENT = re.compile(
    r"(About|Above|After|Against|Among|As|At|Before|Behind|Below|Beside|Between|By|During|For|From|In|Instead|Into|Of|On|Over"
    r"|Per|Since|To|Under|Until|Upon|With|Within|Without"  # prepositions
    r"|How|What|When|Where|Which|Who|Whose|Why"  # questions
    r"|Also|Ditto|Likewise|Same|See|So)\b"
)
"""Matches a doc that begins without its subject. ``Whether`` names a bool, and ``If`` begins a sentence."""
LIKEWISE = re.compile(r"[,;:.] (likewise|ditto)\.?$", re.IGNORECASE)
ARGUMENT = re.compile(r"(?P<indent> +)\*{0,2}(?P<name>[a-z_][\w, *`]*?)(?: \([^)]*\))?: (?P<text>.+)", re.IGNORECASE)


def arguments(doc: str) -> Iterator[tuple[int, str, str]]:
    """Yield line (from 0), name and first line of the text of each argument or attribute in a docstring."""
    section = indent = None
    for number, line in enumerate(doc.splitlines()):
        if line.strip() in SECTIONS:
            section, indent = len(line) - len(line.lstrip()), None
        elif section is not None and line.strip():
            if len(line) - len(line.lstrip()) <= section:
                section = None
            elif (found := ARGUMENT.fullmatch(line)) and indent in (None, len(found["indent"])):
                indent = len(found["indent"])
                yield number, found["name"], found["text"]


def fragments(file: Path) -> Iterator[str]:
    """Yield the findings in a Python file."""
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = node.body[0].value if node.body and isinstance(node.body[0], ast.Expr) else None
        if isinstance(doc, ast.Constant) and isinstance(doc.value, str):
            for number, name, text in arguments(doc.value):
                if FRAGMENT.match(text) or LIKEWISE.search(text):
                    yield f"{file}:{doc.lineno + number}: {name}: {text}"


def main() -> int:
    """Check the packages and return the exit status."""
    paths = [Path(path) for path in sys.argv[1:]] or [ROOT / package for package in PACKAGES]
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    found = [line for file in files for line in fragments(file)]
    for line in found:
        print(line.removeprefix(f"{ROOT}/"))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
