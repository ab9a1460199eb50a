"""Directories of lower layers that a command renames: they move as on any file system, and layers have them whole."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from errata_server.sandbox.base import Sandbox
from errata_server.sandbox.files.trees import MovedDirectories
from errata_server.sandbox.layers import store
from errata_server.sandbox.namespace.backend import NamespaceBackend
from errata_server.sandbox.spec import Directory, File, SandboxSpec

pytestmark = pytest.mark.sandbox

START = SandboxSpec(
    entries=(
        *(Directory(f"/workspace/{name}", owner="agent") for name in ("a", "a/b", "a/b/c", "k")),
        *(File(f"/workspace/{name}", name.encode(), 0o640, "agent") for name in ("a/b/c/f", "a/b/g", "a/h", "k/l")),
    )
)
RENAME = "python3 -c 'import os, sys; os.rename(*sys.argv[1:])'"
"""mv copies where rename(2) fails."""
LOOK = "find . ~ /tmp -printf '%p %y %m %U %l\\n' -type f -exec sha256sum {} + | sort"


async def started(backend: NamespaceBackend) -> Sandbox:
    """A sandbox whose directories lie in two layers below its own."""
    box = await backend.open(spec=START)
    await box.run("mkdir -p a/b/n; echo new > a/b/n/x; ln -s ../h a/b/link; rm a/b/g; touch a/.kept")
    await box.snapshot()
    return box


MOVES = {
    "one": f"{RENAME} a z",
    "into another": f"{RENAME} a/b k/b",
    "with changes": f"{RENAME} a z; echo more >> z/h; rm z/b/c/f; mkdir z/b/c/f; touch z/b/n/y; chmod 700 z/b",
    "twice": f"{RENAME} a y; {RENAME} y z",
    "there and back": f"{RENAME} a z; {RENAME} z a",
    "from inside of one": f"{RENAME} a z; {RENAME} z/b k/b; {RENAME} k/b/c c",
    "over its old name": f"{RENAME} a z; mkdir a; touch a/fresh; {RENAME} z/b a/b",
    "over an empty one": f"mkdir z; {RENAME} a z",
    "over a lower one": f"rm k/l; {RENAME} a k",
    "and removed": f"{RENAME} a z; rm -r z",
    "into a new one": f"mkdir -p p/q; {RENAME} a p/q/a; {RENAME} p r",
    "exchanged": ('python3 -c \'import ctypes; assert ctypes.CDLL(None).renameat2(-100, b"a", -100, b"k", 2) == 0\''),
    "git mv": "git init -q . && git add . && git mv a z && rm -rf .git",
    "in the same directory below a moved one": f"{RENAME} a/b/c a/b/d; {RENAME} a/b a/e; {RENAME} a z",
    "under a long name": f"{RENAME} a $(printf 'n%.0s' {{1..250}})",
}


@pytest.mark.parametrize("what", MOVES)
async def test_a_moved_directory_is_the_same_before_and_after_a_snapshot_and_in_a_fork(
    namespace_backend: NamespaceBackend, what: str
) -> None:
    box = await started(namespace_backend)
    done = await box.run(f"set -e; {MOVES[what]}")
    assert (done.exit_code, done.stderr) == (0, ""), done.stderr
    before = (await box.run(LOOK)).stdout
    digest = await box.merged_digest()
    assert (await box.run(LOOK)).stdout == before, "the digest was read"
    fork = await namespace_backend.restore(await box.snapshot())
    for sandbox in (box, fork):
        assert (await sandbox.run(LOOK)).stdout == before
        assert await sandbox.merged_digest() == digest
    changed = "find . -type f -exec sh -c 'echo changed >> \"$0\"' {} \\; ; rm -rf z/b r; ls -R"
    assert (await box.run(changed)).stdout == (await fork.run(changed)).stdout
    await box.destroy()
    await fork.destroy()


@pytest.mark.parametrize("what", MOVES)
async def test_moving_has_the_digest_of_copying_and_changes_no_layer_below(
    namespace_backend: NamespaceBackend, what: str
) -> None:
    box = await started(namespace_backend)
    below = await box.snapshot()
    await box.run(MOVES[what])
    seen = (await box.run(LOOK)).stdout
    await box.snapshot()
    await box.run("find . -type f -exec sh -c 'echo changed >> \"$0\"' {} +")
    copied = await namespace_backend.restore(below)
    assert (await copied.run("cat a/h")).stdout == "a/h", "the layer below is as it was"
    # The same files, each made anew.
    again = await box.run("true")
    assert again.exit_code == 0
    made = await namespace_backend.restore(below)
    await made.run(MOVES[what])
    await made.run(
        "mkdir /tmp/copy; cp -a . /tmp/copy; find . -mindepth 1 -delete; cp -a /tmp/copy/. .; rm -r /tmp/copy"
    )
    assert (await made.run(LOOK)).stdout == seen
    moved = await namespace_backend.restore(below)
    await moved.run(MOVES[what])
    assert await moved.merged_digest() == await made.merged_digest()
    for sandbox in (box, copied, made, moved):
        await sandbox.destroy()


async def test_a_directory_of_the_base_tree_moves(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    names = (await box.run("ls -A ~")).stdout
    assert names, "the base's home has files"
    assert (await box.run(f"{RENAME} ~ /workspace/home")).exit_code != 0, "its parent belongs to root"
    await box.run("mkdir -p ~/d/e; touch ~/d/e/f")
    await box.snapshot()
    assert (await box.run(f"{RENAME} ~/d /workspace/d; find /workspace/d ~/d")).stdout.split() == [
        "/workspace/d",
        "/workspace/d/e",
        "/workspace/d/e/f",
    ]
    await box.destroy()


async def test_moves_of_many_steps_survive_a_squash(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random moves and changes, here with layers and on a plain directory: the same files all the time."""
    monkeypatch.setattr(store, "MAX_CHAIN", 3)
    box, plain = await started(namespace_backend), await started(namespace_backend)
    chance = random.Random(7)
    commands = [
        "mv {a} {b}", f"{RENAME} {{a}} {{b}}", "mkdir -p {a}/{b}", "echo {n} > {a}/f{n}", "rm -rf {a}/{b}",
        f"{RENAME} {{a}}/{{b}} {{b}}{{n}}", f"{RENAME} {{a}}/{{b}} {{b}}", "rm -f {a}/f*", "cp -r {a} {b}",
    ]  # fmt: skip
    names, look = ("a", "b", "k", "z"), "find . -printf '%p %y %m\\n' -type f -exec sha256sum {} + | sort"
    texts = [chance.choice(commands).format(a=chance.choice(names), b=chance.choice(names), n=n) for n in range(40)]
    seen = []
    for text in texts:
        await box.run(text)
        await box.snapshot()
        seen.append((await box.run(look)).stdout)
    # All in one command, so that nothing is ever in a layer.
    script = "rm -rf /dev/shm/w; cp -a . /dev/shm/w; cd /dev/shm/w; " + "; ".join(
        f"({t}) 2> /dev/null; {look}; echo @" for t in texts
    )
    assert (await plain.run(script, timeout_s=120)).stdout.split("@\n")[:-1] == seen
    await box.destroy()
    await plain.destroy()


async def test_files_are_not_gathered_on_the_event_loop(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await started(namespace_backend)
    await box.run(f"{RENAME} a z")
    calls: list[bool] = []
    real = store.LayerStore._settled

    def settled(*arguments: object) -> Path:
        calls.append(asyncio._get_running_loop() is None)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store.LayerStore, "_settled", settled)
    await box.snapshot()
    assert calls == [True]
    await box.destroy()


async def test_a_failure_leaves_the_directory_as_it_was(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await started(namespace_backend)
    await box.run(f"{RENAME} a z")
    before = (await box.run(LOOK)).stdout
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", _full)
        with pytest.raises(Exception, match="No space left"):
            await box.snapshot()
    assert not list((namespace_backend.store.trash).iterdir())
    assert (await box.run(LOOK)).stdout == before
    await box.run("echo changed > z/h")
    fork = await namespace_backend.restore(await box.snapshot())
    assert (await fork.run("cat z/h")).stdout == "changed\n"
    await box.destroy()
    await fork.destroy()


def _full(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_move_below_a_path_longer_than_the_kernel_takes_is_kept(namespace_backend: NamespaceBackend) -> None:
    box = await started(namespace_backend)
    deep = (
        "for n in {1..30}; do mkdir $(printf 'd%.0s' {1..200}); cd d*; done; "
        + RENAME
        + " /workspace/a moved; cat moved/h"
    )
    assert (await box.run(f"({deep})")).stdout == "a/h"
    await box.snapshot()
    seen = "for n in {1..30}; do cd d*; done; cat moved/h; " + RENAME + " moved again; cat again/b/n/x"
    assert (await box.run(f"({seen})")).stdout == "a/hnew\n"
    await box.snapshot()
    assert (await box.run("(for n in {1..30}; do cd d*; done; cat again/h)")).stdout == "a/h"
    await box.destroy()


def test_the_exception_is_no_error_of_the_file_system() -> None:
    assert not issubclass(MovedDirectories, OSError)
