"""Folding layers and digesting the result, against a model that knows nothing of layers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_server.sandbox.files.trees import ROOT, Node, fold, own_entries, pack, scan, tree_digest, unpack

NAMES = st.sampled_from(["a", "b", "c"])
FILES = st.integers(0, 2).map(lambda content: Node(b"f", bytes([content]) * 32))
GONE = st.just(Node(b"w"))


def directories(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.builds(
        lambda opaque, entries: Node(b"d", b"\1" * 32, opaque, entries),
        st.booleans(),
        st.dictionaries(NAMES, children, max_size=3),
    )


ENTRIES = st.recursive(FILES | GONE, directories, max_leaves=8)
LAYERS = st.lists(st.dictionaries(NAMES, ENTRIES, max_size=3).map(lambda e: Node(b"d", children=e)), max_size=5)
Model = dict[str, tuple[bytes, bytes]]


def visible(root: Node) -> Model:
    """Return what a folded tree shows over an empty base."""
    found: Model = {}

    def visit(node: Node, path: str) -> None:
        for name, child in node.children.items():
            if child.kind != b"w":
                found[f"{path}/{name}"] = (child.kind, child.mark)
                visit(child, f"{path}/{name}")

    visit(root, "")
    return found


def plain(node: Node) -> tuple[object, ...]:
    return node.kind, node.mark, node.opaque, {name: plain(child) for name, child in node.children.items()}


def apply(model: Model, layer: Node, path: str = "") -> None:
    """Do to a flat model what mounting ``layer`` over it does."""
    for name, child in layer.children.items():
        here = f"{path}/{name}"
        before = model.get(here)
        if child.kind != b"d" or child.opaque or (before is not None and before[0] != b"d"):
            for old in [p for p in model if p == here or p.startswith(here + "/")]:
                del model[old]
        if child.kind != b"w":
            model[here] = (child.kind, child.mark)
            apply(model, child, here)


@given(LAYERS)
def test_folding_shows_what_mounting_would(layers: list[Node]) -> None:
    tree, model = ROOT, Model()
    for layer in layers:
        tree = fold(tree, layer)
        apply(model, layer)
    assert visible(tree) == model


@given(LAYERS)
def test_a_packed_tree_unpacks_to_the_same(layers: list[Node]) -> None:
    tree = ROOT
    for layer in layers:
        tree = fold(tree, layer)
    assert plain(unpack(pack(tree))) == plain(tree)


@pytest.fixture(scope="module")
def empty_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


@given(one=LAYERS, two=LAYERS)
def test_digests_are_equal_exactly_for_equal_trees(empty_base: Path, one: list[Node], two: list[Node]) -> None:
    trees = []
    for layers in (one, two):
        tree = ROOT
        for layer in layers:
            tree = fold(tree, layer)
        trees.append(unpack(pack(tree)))
    digests = [tree_digest(tree, empty_base, "base") for tree in trees]
    assert (digests[0] == digests[1]) == (visible(trees[0]) == visible(trees[1]))


def test_folding_changes_neither_tree_and_shares_what_is_untouched() -> None:
    below = Node(b"d", children={"kept": Node(b"d", b"\1" * 32, children={"f": Node(b"f")}), "x": Node(b"f")})
    layer = Node(b"d", children={"x": Node(b"w")})
    tree = fold(below, layer)
    assert tree.children["kept"] is below.children["kept"]
    assert below.children["x"].kind == b"f"


def test_a_tree_of_thousands_of_levels_needs_no_recursion(empty_base: Path) -> None:
    node = Node(b"f", b"\2" * 32)
    for _ in range(5000):
        node = Node(b"d", b"\1" * 32, children={"d": node})
    layer = Node(b"d", children={"d": node})
    tree = fold(fold(ROOT, layer), layer)
    assert tree_digest(tree, empty_base, "base") == tree_digest(unpack(pack(tree)), empty_base, "base")


def test_symlinks_of_the_base_are_not_followed(tmp_path: Path) -> None:
    """A directory in the place of a symlink to a directory is new, whatever the symlink led to, on the host even."""
    elsewhere, upper = tmp_path / "elsewhere", tmp_path / "upper"
    for root in (elsewhere, upper / "w/link"):
        root.mkdir(parents=True)
        (root / "f").write_text("same")
        (root / "f").chmod(0o644)
    digests = set()
    for name in ("with", "without"):
        base = tmp_path / name
        (base / "w").mkdir(parents=True)
        (base / "w/link").symlink_to(elsewhere)
        digests.add(tree_digest(scan(upper), base, "base"))
        (elsewhere / "f").write_text("another")
    assert len(digests) == 1


def test_what_a_cached_tree_holds_for_itself_is_what_its_layer_touched() -> None:
    below = Node(
        b"d", children={f"d{n}": Node(b"d", children={f"f{k}": Node(b"f") for k in range(9)}) for n in range(7)}
    )
    layer = Node(b"d", children={"d1": Node(b"d", children={"f1": Node(b"w")}), "x": Node(b"f")})
    assert own_entries(below, below) == 8 + 7 * 10
    assert own_entries(fold(below, layer), layer) == (1 + 8) + (1 + 9)


KIB = 1024
CONTENTS = {
    "one byte": [(0, b"x")],
    "a zero": [(0, b"\0")],
    "two zeros": [(0, b"\0\0")],
    "data then zeros": [(0, b"x"), (300 * KIB, b"\0")],
    "zeros then data": [(0, b"\0"), (300 * KIB, b"x")],
    "data later": [(0, b"\0"), (364 * KIB, b"x")],
    "data between": [(0, b"\0"), (200 * KIB - 1, b"xy"), (400 * KIB, b"\0")],
    "zeros between": [(0, b"x"), (400 * KIB, b"y")],
    "zeros between, longer": [(0, b"x"), (464 * KIB, b"y")],
    "only zeros": [(400 * KIB, b"\0")],
    "more zeros": [(400 * KIB + 1, b"\0")],
}
"""Offsets and bytes; what lies between is zeros."""


def digest_of_file(directory: Path, base: Path, parts: list[tuple[int, bytes]], *, sparse: bool) -> str:
    directory.mkdir()
    size = max(at + len(data) for at, data in parts)
    with (directory / "f").open("wb") as file:
        file.truncate(size) if sparse else file.write(bytes(size))
        for at, data in parts:
            if not sparse or data.strip(b"\0"):
                file.seek(at)
                file.write(data)
    return tree_digest(scan(directory), base, "base")


def test_a_hole_counts_as_the_zeros_that_it_stands_for(tmp_path: Path, empty_base: Path) -> None:
    digests = {
        name: {
            digest_of_file(tmp_path / f"{name} {sparse}", empty_base, parts, sparse=sparse) for sparse in (False, True)
        }
        for name, parts in CONTENTS.items()
    }
    assert {name: len(found) for name, found in digests.items()} == dict.fromkeys(CONTENTS, 1)
    assert len(set().union(*digests.values())) == len(CONTENTS)


def test_holes_are_not_read(tmp_path: Path, empty_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of sparse files are made in an instant, and a snapshot must not take longer than its time limit."""
    read = 0

    def counted(call: Callable[..., bytes]) -> Callable[..., bytes]:
        def function(*arguments: int) -> bytes:
            nonlocal read
            data = call(*arguments)
            read += len(data)
            return data

        return function

    for name in ("read", "pread"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    with (tmp_path / "f").open("wb") as file:
        file.truncate(64 * KIB**2)
        file.seek(32 * KIB**2)
        file.write(b"x")
    scan(tmp_path)
    assert 0 < read < KIB**2


def test_a_file_without_a_block_of_zeros_keeps_its_digest(tmp_path: Path) -> None:
    """Layers on disk and journals hold digests of earlier servers."""
    content = (b"text" + bytes(60 * KIB)) * 5 + b"end"
    (tmp_path / "f").write_bytes(content)
    info = (tmp_path / "f").stat()
    header = b"f %o %d %d\0" % (info.st_mode & 0o7777, info.st_uid, info.st_gid)
    assert scan(tmp_path).children["f"].mark == hashlib.sha256(header + content).digest()
