"""Which hunk of a patch git refused: from the patch and git's own words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swe_bench_lite_env.server.patches import COMMAND, applicable, hunks, refusal
from swe_bench_lite_env.server.texts import ToolRefused, bounded, lines_of, replaced
from tests.counted_work import Costs, calls_of

TEXT = "".join(f"line {number}\n" for number in range(1, 41))
GOOD = """diff --git a/src/a.txt b/src/a.txt
--- a/src/a.txt
+++ b/src/a.txt
@@ -1,4 +1,4 @@
 line 1
-line 2
+LINE 2
 line 3
 line 4
@@ -20,3 +20,4 @@ somewhere
 line 20
 line 21
+more
 line 22
@@ -38,3 +39,3 @@
 line 38
-line 39
+LINE 39
 line 40
diff --git a/b.txt b/b.txt
new file mode 100644
--- /dev/null
+++ b/b.txt
@@ -0,0 +1,2 @@
+one
+two
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.txt").write_text(TEXT)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


CONTEXT = """diff --git a/src/a.txt b/src/a.txt
--- a/src/a.txt
+++ b/src/a.txt
@@ -1,3 +1,4 @@
 line
+more
 
 
"""  # noqa: W293 - a diff has such lines


@pytest.mark.parametrize("patch", [GOOD, GOOD[:-1], CONTEXT, CONTEXT[:-1], CONTEXT[:-3], CONTEXT.strip()])
def test_a_stripped_patch_applies(patch: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.txt").write_text("line\n\n\n" if patch in CONTEXT else TEXT)
    done = subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=applicable(patch), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "more\n" in (tmp_path / "src/a.txt").read_text()


def applied(tree: Path, patch: str) -> subprocess.CompletedProcess[str]:
    command = COMMAND.format(root=tree)
    return subprocess.run(
        ["bash", "-c", command], input=patch, capture_output=True, text=True, env={"PATH": "/usr/bin"}
    )


def test_hunks_are_found_with_their_places() -> None:
    found = hunks(GOOD)
    assert [(hunk.file, hunk.number, hunk.line) for hunk in found] == [
        ("src/a.txt", 1, 1),
        ("src/a.txt", 2, 20),
        ("src/a.txt", 3, 38),
        ("b.txt", 1, 0),
    ]
    assert GOOD[found[1].start : found[1].end].splitlines()[0] == "@@ -20,3 +20,4 @@ somewhere"
    assert GOOD[found[1].start : found[1].end].splitlines()[-1] == " line 22"
    assert not any(hunk.problem for hunk in found)


def test_a_good_patch_applies_whole(tree: Path) -> None:
    assert applied(tree, GOOD).returncode == 0
    assert (tree / "b.txt").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("wrong", "right", "number", "line"),
    [("line 2\n+LINE 2", "line two\n+LINE 2", 1, 1), (" line 21", " line XXI", 2, 20), ("-line 39", "-line 93", 3, 38)],
)
def test_the_hunk_that_does_not_match_is_named(tree: Path, wrong: str, right: str, number: int, line: int) -> None:
    patch = GOOD.replace(wrong, right)
    done = applied(tree, patch)
    assert done.returncode != 0 and (tree / "src/a.txt").read_text() == TEXT and not (tree / "b.txt").exists()
    text, detection = refusal(patch, done.stderr)
    assert text.startswith(f"hunk {number} of src/a.txt, at line {line}, ") and text.endswith("nothing was changed")
    site = detection.error_site
    assert detection.error_kind == "patch_failed" and site is not None
    assert (site.file, site.line, site.action_field) == ("src/a.txt", line, "patch")
    assert site.action_span and patch[slice(*site.action_span)].startswith("@@")


def test_each_file_that_refuses_is_named_once(tree: Path) -> None:
    patch = GOOD.replace(" line 21", " line XXI").replace("b/b.txt", "b/src/a.txt").replace("a/b.txt", "a/src/a.txt")
    patch += "diff --git a/gone.txt b/gone.txt\n--- a/gone.txt\n+++ b/gone.txt\n@@ -1 +1 @@\n-x\n+y\n"
    text, detection = refusal(patch, applied(tree, patch).stderr)
    assert "gone.txt: No such file or directory" in text
    assert len(detection.error_sites) == len({site.file for site in detection.error_sites})


def test_a_hunk_with_wrong_counts_is_named(tree: Path) -> None:
    patch = GOOD.replace("@@ -20,3 +20,4 @@", "@@ -20,9 +20,10 @@")
    text, detection = refusal(patch, applied(tree, patch).stderr)
    assert text.startswith("hunk 2 of src/a.txt") and "9 old and 10 new lines" in text and "3 and 4" in text
    assert detection.error_site and detection.error_site.file == "src/a.txt"


@pytest.mark.parametrize(
    "header", ["@@ -{0},1 +1 @@", "@@ -1,{0} +1 @@", "@@ -1,3 +{0} @@", "@@ -1 +1,{0} @@", "@@ -1,4 +1,4 {0} @@"]
)
@pytest.mark.parametrize("digits", [10, 5000])
def test_a_number_too_long_to_read_is_refused_like_any_wrong_hunk(tree: Path, header: str, digits: int) -> None:
    patch = GOOD.replace("@@ -20,3 +20,4 @@", header.format("1" * digits))
    done = applied(tree, patch)
    assert done.returncode != 0
    text, detection = refusal(patch, done.stderr)
    assert text.endswith("nothing was changed") and detection.error_kind == "patch_failed"


@pytest.mark.parametrize(
    "line",
    [
        "error: patch failed: src/a.txt:{0}",
        "error: corrupt patch at line {0}",
        "error: git diff header lacks filename information when removing 1 leading pathname component (line {0})",
    ],
)
def test_a_number_too_long_to_read_in_what_git_says_names_no_hunk(line: str) -> None:
    text, detection = refusal(GOOD, line.format("1" * 5000) + "\n")
    assert text.endswith("nothing was changed") and detection.error_kind == "patch_failed"
    assert detection.error_site and detection.error_site.line is None


@pytest.mark.parametrize("patch", ["", "hello", "*** Begin Patch\n*** Update File: a.py\n"])
def test_what_is_no_diff_is_said_to_be_none(tree: Path, patch: str) -> None:
    text, detection = refusal(patch, applied(tree, patch + "\n").stderr)
    assert text.startswith("no diff was found") and detection.error_kind == "patch_failed"


def test_an_edit_replaces_what_occurs_once() -> None:
    assert replaced(b"a\nb\nc\n", "b\n", "x\ny\n") == b"a\nx\ny\nc\n"
    assert replaced("é ü".encode(), "ü", "") == "é ".encode()


@pytest.mark.parametrize(
    ("content", "old", "says", "line"),
    [
        (b"a\nb\na\n", "a", "2 times, at lines 1, 3", 1),
        (b"aaa", "aa", "2 times, at lines 1, 1", 1),
        (b"a\n" * 10, "a", "10 times, at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10: give", 1),
        (b"a\n" * 12, "a", r"more than 10 times, at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, \.\.\.: give", 1),
        (b"if x:\n    y = 1\n", "if x:\n  y = 1", "line 1 differs", 1),
        (b"a\nif x:\n\ty = 1\nb", "\nif x:\n  y = 1\n", "line 2 differs", 2),
        (b"a\nif x:\n\ty = 12\n", "if x:\n  y = 1", "does not occur in the file", None),
        (b"a\r\nb\r\n", "a\nb", r"end with \\r\\n", None),
        (b"a\n", "b", "does not occur in the file", None),
        (b"", "b", "does not occur", None),
    ],
)
def test_an_edit_that_names_no_one_place_is_refused(content: bytes, old: str, says: str, line: int | None) -> None:
    with pytest.raises(ToolRefused, match=says) as caught:
        replaced(content, old, "new")
    assert (caught.value.field, caught.value.line) == ("old_text", line)


@pytest.mark.parametrize(
    ("content", "old"),
    [(b" " * 2**20, " "), (b" \n" * 2**19, " " * 1000), (b" \n" * 2**19, "\n \n" * 2**17 + "x"), (b"\n" * 2**20, "x")],
)
def test_an_edit_of_a_large_file_is_refused_at_once(content: bytes, old: str) -> None:
    # The event loop of all sessions waits for it. In quadratic time each took ten seconds: ten thousand times what
    # it takes to count the lines, which is now a tenth of it.
    def refused() -> None:
        with pytest.raises(ToolRefused):
            replaced(content, old, "new")

    calls_of(refused, at_most=500)
    assert not Costs(lambda: content.count(b"\n")).exceed(refused, times=200)


def test_lines_are_those_of_an_editor() -> None:
    content = b"one\r\ntwo\x0cstill two\nthree"
    assert lines_of(content, 2, 2) == b"two\x0cstill two\n"
    assert lines_of(content, 3, None) == b"three" and lines_of(content, None, 1) == b"one\r\n"
    assert lines_of(content, 2, 99) == b"two\x0cstill two\nthree"
    assert lines_of(b"", 1, None) == b""
    with pytest.raises(ToolRefused, match="first_line is 4: the file has 3 lines"):
        lines_of(content, 4, None)


def test_a_long_text_keeps_its_head_and_its_tail() -> None:
    text, truncated = bounded(b"a" * 100 + b"b" * 100, 20)
    assert truncated and text.startswith("a" * 10) and text.endswith("b" * 10) and "180 bytes not kept" in text
