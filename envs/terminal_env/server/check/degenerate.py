"""Programs that solve no task. Where one scores, the task's verifier has a hole."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType

from ..tasks import Task

_GENERAL = {
    "echo": "echo done",
    "exit 0": "exit 0",
    "exit 1": "exit 1",
    "delete everything": "find . -mindepth 1 -delete 2>/dev/null; rm -rf ~/* 2>/dev/null; true",
    "delete all files": "find . -type f -delete 2>/dev/null; true",
    "empty all files": "find . -type f -not -path '*/.git/*' -exec truncate -s 0 {} + 2>/dev/null; true",
    "chmod -R 777": "chmod -R 777 . 2>/dev/null; true",
    "chmod -R 000": "chmod -R 000 . 2>/dev/null; true",
    "touch everything": "find . -exec touch {} + 2>/dev/null; true",
    "always true": (
        "find . -type f -not -path '*/.git/*' \\( -perm -u+x -o -name '*.sh' \\) "
        '-exec sh -c \'for f; do printf "#!/bin/sh\\nexit 0\\n" > "$f"; done\' sh {} + 2>/dev/null; true'
    ),
    "sources without code": (
        "find . -type f \\( -name '*.py' -o -name '*.c' -o -name '*.js' \\) -exec truncate -s 0 {} + 2>/dev/null; true"
    ),
    "commit everything": (
        "git add -A 2>/dev/null && git -c user.name=a -c user.email=a@b commit -qm done 2>/dev/null; true"
    ),
}
"""Name to bash text, run in the work directory."""

_CONTENTS = {
    "named files, empty": "",
    "named files, a line": "done\n",
    "named files, 0": "0\n",
    "named files, {}": "{}\n",
    "named files, []": "[]\n",
    "named files, exit 0": "#!/bin/sh\nexit 0\n",
}
_PATH = re.compile(
    r"(?<![\w/.:~-])(?:/|\.{1,2}/|~/)?[\w.-]+(?:/[\w.-]+)*\.[A-Za-z]\w{0,7}(?![\w/])|(?<![\w:/])/[\w.-]+(?:/[\w.-]+)+"
)
_QUOTED = re.compile(r"`([^`\s]+)`")
_MAX_PATHS = 30


def named_paths(instruction: str) -> list[str]:
    """Return what looks like a path in an instruction, in its order."""
    found = [*_QUOTED.findall(instruction), *_PATH.findall(instruction)]
    kept = dict.fromkeys(path.rstrip(".,;:)") for path in found if re.fullmatch(r"[\w./~+-]+", path))
    return [path for path in kept if path.strip("./~") and not path.startswith("-")][:_MAX_PATHS]


def programs(task: Task) -> Mapping[str, str]:
    """Return the degenerate programs for ``task``: name to bash text, run in its work directory."""
    made = dict(_GENERAL)
    paths = named_paths(task.instruction)
    if paths:
        places = " ".join(
            f"{'~/' if path.startswith('~/') else ''}{shlex.quote(path.removeprefix('~/'))}" for path in paths
        )
        for name, content in _CONTENTS.items():
            write = f'mkdir -p "$(dirname "$p")" && printf %s {shlex.quote(content)} > "$p" && chmod 755 "$p"'
            made[name] = f'for p in {places}; do {{ [ -d "$p" ] || {{ {write}; }}; }} 2>/dev/null; done; true'
    return MappingProxyType(made)
