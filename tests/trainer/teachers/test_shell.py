"""One spelling for shell commands: what must come out equal, and above all what must not."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from errata_trainer.teachers.shell import Unreadable, canonical_shell
from tests.hangs import HANGS_S

SAME = [
    ("ls 'a b'", 'ls "a b"', r"ls a\ b"),
    ("ls   -l\ta", "ls -l a", "ls -l a  # comment", "ls -l a;", "\nls -l a\n", "ls \\\n -l a", "l's' '-l' a''"),
    ("cd /w && ls", "ls", "cd /w/ && cd . && ls", "cd '/w/../w' && ls"),
    ("a|b&&c", "a | b && c"),
    ("a\nb", "a; b", "a;\n\nb\n"),
    ("if true\nthen\n  a\nfi", "if true; then a; fi"),
    ("grep x f>out 2>&1", "grep 'x' f > out 2>&1"),
    ("cat <<'E'\n $x\nE\n", 'cat << "E"\n $x\nE'),
    (r"find . -exec rm {} \;", "find . -exec rm '{}' ';'"),
    (r'echo "\$x"', "echo '$x'", r"echo \$x"),
    ('A=1 b "$c"', "A='1' b \"$c\""),
    ("echo  $(case a in a) b;; esac)", "echo $(case a in a) b;; esac)"),
    ("echo $(a # it's\n)  b", "echo $(a # it's\n) b"),
]

DIFFERENT = [
    ("rm a", "rm a b"),
    ("echo $x", "echo '$x'"),
    ("echo $x", 'echo "$x"'),
    ('echo "$x"y', 'echo "$xy"'),
    ('echo "$x"y', 'echo "$x" y'),
    ("ls *", "ls '*'"),
    ("ls [a-z]", "ls [a'-'z]"),
    ("echo {a,b}", "echo '{a,b}'"),
    ("echo ~", "echo '~'"),
    ("echo ~root", 'echo ~"root"'),
    ("a; b", "a && b"),
    ("a & b", "a; b"),
    ("a b", "'a b'"),
    ("A=b c", "'A=b' c"),
    ("echo 2>f", "echo 2 >f"),
    ("echo {fd}>f", "echo {fd} >f"),
    ("echo a<(b)", "echo a <(b)"),
    ("((x))", "( (x) )"),
    ("if", "'if'"),
    ("cat <<E\n$x\nE\n", "cat <<'E'\n$x\nE\n"),
    ("cat <<E\na  b\nE\n", "cat <<E\na b\nE\n"),
    ("echo 'a  b'", "echo 'a b'"),
    ("echo $(a  'b  c')", "echo $(a  'b c')"),
    ("cd /other && ls", "ls"),
    ("ls -a -l", "ls -l -a"),
    ("x=$y''", "x=$y'z'"),
    ("cd /w; ls", "cd /w & ls"),
    (">f\nls", ">f ls"),
    ("A=1\nls", "A=1 ls"),
    ("a=~", "a='~'"),
    ("cat <<E |\nE\na", "cat <<E\nE\na"),
    ('echo $"a"', "echo '$a'"),
    ("echo ${x:-'}  b'}", "echo ${x:-'} b'}"),
    ("echo ${x:-$'\\'}  b'}", "echo ${x:-$'\\'} b'}"),
    ("echo $((a; echo ')  b') )", "echo $((a; echo ') b') )"),
    ("echo $(a <<E\n)  b\nE\n)", "echo $(a <<E\n) b\nE\n)"),
    ("echo $(case x in a) b;;  esac)", "echo $(case x in a) b;; esac)"),
]

UNREADABLE = [
    "echo 'a",
    'echo "a',
    "echo $(a",
    "echo `a",
    "cat <<E\na\n",
    "a \\",
    "[[ a =~ b ]]",
    "a\0b",
    "a <\nb",
    "!\na",
    "$a\\\nb",
    '"$a\\\nb"',
    "2\\\n>f",
    "(\\\n(a) )",
    "echo ${x\n}",
    "echo " + "$(" * 40 + ")" * 40,
]

PIECES = st.sampled_from(list("a\\'\"\n ;|&()<>`}{#*[]~=2")) | st.sampled_from(
    ["b c", "$x", '"$x"', "'$x'", "&&", ">>", "<<E\n", "E\n", "$(", "${", "A=", "if", "then", "done", "''", "cd /w && "]
)
COMMANDS = st.lists(PIECES, max_size=12).map("".join)


@pytest.mark.parametrize("spellings", SAME)
def test_spellings_of_one_command_are_equal(spellings: tuple[str, ...]) -> None:
    assert len({canonical_shell(spelling, cwd="/w") for spelling in spellings}) == 1


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_commands_are_not_equal(one: str, other: str) -> None:
    assert canonical_shell(one, cwd="/w") != canonical_shell(other, cwd="/w")


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        canonical_shell(text)


def test_without_a_known_directory_no_cd_is_left_out() -> None:
    assert canonical_shell("cd /w && ls") != canonical_shell("ls")


@given(COMMANDS)
@settings(max_examples=1000, deadline=None)
def test_the_spelling_of_a_spelling_is_itself(command: str) -> None:
    try:
        once = canonical_shell(command, cwd="/w")
    except Unreadable:
        assume(False)
    assert canonical_shell(once, cwd="/w") == once


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


def _single(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _double(word: str) -> str:
    return '"' + "".join("\\" + c if c in '$`"\\' else c for c in word) + '"'


def _backslashes(word: str) -> str:
    return "".join("'\n'" if c == "\n" else "\\" + c for c in word) or "''"


@given(st.lists(WORDS, min_size=1, max_size=4))
def test_how_words_are_quoted_makes_no_difference_and_what_they_are_does(words: list[str]) -> None:
    spellings = {canonical_shell(" ".join(map(quote, words))) for quote in (_single, _double, _backslashes)}
    assert len(spellings) == 1
    assert canonical_shell(" ".join(map(_single, [*words, ""]))) not in spellings


# Not `&`: what runs in the background prints when it likes, so Bash itself does not do the same twice.
SAFE = st.sampled_from(list("a *2{},~!\n;|()=#")) | st.sampled_from(
    ["'a'", '"a', 'b"', "\\ ", "$x", '"$x"', "''", "A=1", "$A", "&& echo", "| cat", "; echo b", "\nprintf '<%s>' c"]
) | st.sampled_from(
    ["{ ", "; }", "<<E\n$x\nE\n", "<<'E'\n$x\nE\n", "<<<w", "$(echo q)", "if true; then ", "; fi"]
)  # fmt: skip


@given(st.lists(SAFE, max_size=10))
@settings(max_examples=60, deadline=None)
def test_bash_does_the_same(pieces: list[str]) -> None:
    """The one spelling is, most often, a command again; Bash says whether it is the same one."""
    command = "printf '<%s>' " + "".join(pieces)
    try:
        spelling = canonical_shell(command)
    except Unreadable:
        assume(False)
    assume("((" not in command)  # their spelling is for comparing only
    environment = {"PATH": "/usr/bin:/bin", "x": "p  q", "HOME": "/h"}

    def run(*options: str) -> tuple[int, bytes]:
        ended = subprocess.run(["bash", *options], env=environment, cwd="/", capture_output=True, timeout=HANGS_S)
        return ended.returncode, ended.stdout

    assume(run("-nc", command)[0] == 0)
    assert run("-c", command) == run("-c", spelling)


def test_a_long_command_takes_linear_time() -> None:
    text = 'echo "' + "x" * 300_000 + '" ' + "[" * 50_000 + "=" * 50_000
    assert len(canonical_shell(text)) == len(text) - 2
