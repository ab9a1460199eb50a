#!/usr/bin/env python3
"""Record the labelled command outputs that measure the error detectors.

``tests/protocol/data/recipes/`` says what to run and what the answer is; this script runs each recipe for real and
writes one JSON object a line. A recipe is never given its output: only the label is written by hand, so that a corpus
recorded on another tree (newer Python, other git) keeps honest outputs under the same labels.

Each command runs as an unprivileged uid in a chroot of TREE, in its own mount, pid, network and ipc namespaces, with a
fresh workspace, home and /tmp, stdin at end of file and stdout apart from stderr. It needs root (for the namespaces)
and ``unshare`` of util-linux; ``tests/protocol/data/README.md`` has the debootstrap line that makes TREE.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "protocol" / "data"))

from recipes import CORPORA, TREES, WHOLE, Recipe, Site, Span  # noqa: E402  (found through the path set above)

UID = 1000
NPROC_LIMIT = 400
ENVIRONMENT = {
    "PATH": "/opt/env/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/agent",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "GIT_AUTHOR_DATE": "2024-05-01T10:00:00Z",  # so that commit ids do not change from one recording to the next
    "GIT_COMMITTER_DATE": "2024-05-01T10:00:00Z",
    "GIT_CONFIG_NOSYSTEM": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
GITCONFIG = """[user]
	name = Agent
	email = agent@example.com
[init]
	defaultBranch = main
[advice]
	detachedHead = false
"""
# Runs as root inside the new namespaces; $1 = tree, $2 = the recipe's scratch directory, $3 = cwd, $4 = command. The
# command is not exec'ed: as pid 1 it would be immune to its own signals. This shell's own stderr is closed meanwhile,
# or its "Segmentation fault" would stand in the recorded one.
ENTER = r"""set -e
mount --make-rprivate /
for name in workspace testbed home/agent; do mount --bind "$2/$name" "$1/$name"; done
mount -t tmpfs -o mode=1777,size=64m tmpfs "$1/tmp"
mount -t proc proc "$1/proc"
ip link set lo up
exec 3>&2 2>/dev/null
(
  exec /usr/sbin/chroot --userspec={uid}:{uid} "$1" /bin/bash -c \
    'cd "$0" && ulimit -c 0 -u {nproc} && exec /bin/bash -c "$1"' "$3" "$4" 2>&3 3>&-
) || exit $?
"""


def prepare_tree(tree: Path) -> None:
    """Add to a debootstrap tree the user, the mount points and the program names that agents expect.

    Raises:
        SystemExit: The tree has no bash, or this process is not root.
    """
    if os.geteuid() != 0:
        raise SystemExit("recording needs root: it makes namespaces and drops to an unprivileged uid inside them")
    if not (tree / "bin" / "bash").exists():
        raise SystemExit(f"{tree} has no bin/bash: make it with the debootstrap line in tests/protocol/data/README.md")
    passwd = tree / "etc" / "passwd"
    if "agent:" not in passwd.read_text():
        passwd.write_text(passwd.read_text() + f"agent:x:{UID}:{UID}::/home/agent:/bin/bash\n")
        group = tree / "etc" / "group"
        group.write_text(group.read_text() + f"agent:x:{UID}:\n")
    for name in ("workspace", "testbed", "home/agent"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    (tree / "etc" / "hosts").write_text("127.0.0.1 localhost\n")


def enter(tree: Path, scratch: Path, cwd: str, command: str, limit_s: float) -> tuple[int | None, bytes, bytes]:
    """Run a command in the tree.

    Returns:
        Exit code (None when the limit killed it), stdout, stderr.
    """
    script = ENTER.format(uid=UID, nproc=NPROC_LIMIT)
    unshare = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
    process = subprocess.Popen(
        [*unshare, "/bin/sh", "-c", script, "enter", str(tree), str(scratch), cwd, command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        return None, stdout, stderr
    code = process.returncode
    return (128 - code if code < 0 else code), stdout, stderr


def lay_out(tree: Path, scratch: Path, recipe: Recipe) -> Path:
    """Write the recipe's files below ``scratch`` and return the directory that is its cwd."""
    for name in ("workspace", "testbed", "home/agent"):
        (scratch / name).mkdir(parents=True)
    if TREES[recipe.tree].root:
        subprocess.run(["cp", "-a", f"{tree}/testbed/.", str(scratch / "testbed")], check=True)
    (scratch / "home" / "agent" / ".gitconfig").write_text(GITCONFIG)
    work = scratch / recipe.cwd.lstrip("/")
    for name, text in {**TREES[recipe.tree].files, **recipe.files}.items():
        target = work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
        if text.startswith("#!"):
            target.chmod(0o755)
    for path in (scratch, *scratch.rglob("*")):
        os.chown(path, UID, UID, follow_symlinks=False)
    return work


def span_in(command: str, span: Span) -> list[int]:
    """Return the ``[start, end)`` code points of the text that a recipe names, which must be unique or numbered."""
    if span == WHOLE:
        return [0, len(command)]
    text, index = (span, None) if isinstance(span, str) else span
    if index is None and command.count(text) != 1:
        raise SystemExit(f"{text!r} is {command.count(text)} times in {command!r}: give (text, n)")
    start = -1
    for _ in range((index or 0) + 1):
        start = command.find(text, start + 1)
        if start < 0:
            raise SystemExit(f"{text!r} number {index} is not in {command!r}")
    return [start, start + len(text)]


def line_of(work: Path, file: str, text: str) -> int:
    """Return the 1-based number of the only line of a file that holds ``text``."""
    path = work / file
    hits = [n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    if len(hits) != 1:
        raise SystemExit(f"{text!r} is on lines {hits} of {file}, not on one")
    return hits[0]


def resolve(site: Site, command: str, work: Path) -> dict[str, Any]:
    """Turn a recipe's site, written with texts, into the numbers of a corpus row."""
    line = site.line
    if site.at is not None:
        assert site.file is not None
        line = line_of(work, site.where or site.file, site.at)
    return {
        "file": site.file,
        "line": line,
        "test_id": site.test,
        "action_span": None if site.span is None else span_in(command, site.span),
    }


def record(tree: Path, recipe: Recipe, identifier: str) -> dict[str, Any]:
    """Run one recipe in a fresh workspace and return its corpus row."""
    scratch = Path(tempfile.mkdtemp(prefix="record-"))
    try:
        work = lay_out(tree, scratch, recipe)
        setup = "\n".join(part for part in (TREES[recipe.tree].setup, recipe.setup) if part)
        if setup:
            code, out, err = enter(tree, scratch, recipe.cwd, setup, 60)
            if code != 0:
                raise SystemExit(f"setup of {recipe.command!r} ended with {code}: {(out + err).decode()}")
        sites = [resolve(site, recipe.command, work) for site in recipe.sites]
        code, stdout, stderr = enter(tree, scratch, recipe.cwd, recipe.command, recipe.limit_s)
    finally:
        shutil.rmtree(scratch)
    row: dict[str, Any] = {
        "id": identifier,
        "cwd": recipe.cwd,
        "command": recipe.command,
        "exit_code": code,
        "timed_out": code is None,
        "stdout": stdout.decode(errors="replace"),
        "stderr": stderr.decode(errors="replace"),
        "expected_kind": recipe.kind,
        "expected_site": sites[0] if sites else None,
    }
    if recipe.ambiguous:
        row["ambiguous"] = True
    if recipe.also:
        row["also_accept"] = list(recipe.also)
    if len(sites) > 1:
        row["also_accept_sites"] = sites[1:]
    return row


def root_of(arguments: argparse.Namespace, name: str) -> Path:
    """Return the root file system that a tree of recipes asks for, by its name; without one that of ``--root``."""
    given = arguments.roots / name if name and arguments.roots else arguments.root
    if given is None or (name and arguments.roots is None):
        raise SystemExit(f"give --roots, a directory with {name}" if name else "give --root, a Debian 12 tree")
    root: Path = given.resolve()
    return root


def main() -> None:
    """Record every recipe of a corpus, or those whose command holds ``--only``, in their written order."""
    parser = argparse.ArgumentParser(description="Record the labelled command outputs anew.")
    parser.add_argument("--root", type=Path, metavar="TREE", help="a Debian 12 tree (see the README)")
    parser.add_argument("--roots", type=Path, metavar="DIR", help="trees with a repository in /testbed, by name")
    parser.add_argument("--out", type=Path, required=True, help="the JSON lines file to write")
    parser.add_argument("--corpus", choices=sorted(CORPORA), default="outputs", help="which recipes to record")
    parser.add_argument("--only", default="", help="record the recipes whose command holds this text")
    arguments = parser.parse_args()
    prefix, recipes = CORPORA[arguments.corpus]
    numbered = [(number, recipe) for number, recipe in enumerate(recipes, 1) if arguments.only in recipe.command]
    for name in {TREES[recipe.tree].root for _, recipe in numbered}:
        prepare_tree(root_of(arguments, name))
    rows = [
        record(root_of(arguments, TREES[recipe.tree].root), recipe, f"{prefix}-{number:03d}")
        for number, recipe in numbered
    ]
    text = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows)
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
