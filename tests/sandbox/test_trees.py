"""Folding layers and digesting the result, against a model that knows nothing of layers."""

from __future__ import annotations

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
