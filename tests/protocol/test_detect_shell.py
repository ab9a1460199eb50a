"""The shell reader: simple commands and spans, on whole scripts, half scripts and noise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errata_protocol.detect.action import Action
from errata_protocol.detect.shell import parse
from errata_protocol.detect.shell_tree import simples
from tests.counted_work import Costs, calls_of, processor_s


def commands(text: str) -> list[str]:
    return [text[s.start : s.end] for s in simples(parse(text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat a | grep 'x | y' > out 2>&1 && echo done", ["cat a", "grep 'x | y' > out 2>&1", "echo done"]),
        ('x=$(foo a); echo "$x"; exit 3', ["foo a", "x=$(foo a)", 'echo "$x"', "exit 3"]),
        ("if [ -f x ]; then cat x; else ls; fi", ["[ -f x ]", "cat x", "ls"]),
        ("for i in 1 2; do echo $i; done | sort", ["echo $i", "sort"]),
        ("while read l; do echo $l; done < f", ["read l", "echo $l"]),
        ("case $x in a|b) ls;; *) pwd ;; esac; id", ["ls", "pwd", "id"]),
        ("f() { grep x y; }; f", ["grep x y", "f"]),
        ("diff <(ls a) <(ls b)", ["ls a", "ls b", "diff <(ls a) <(ls b)"]),
        ("[[ a && b < c ]] || (( 1 > 2 ))", ["[[ a && b < c ]]", "(( 1 > 2 ))"]),
        ("echo `ls $(pwd)` # a comment; rm x", ["pwd", "ls $(pwd)", "echo `ls $(pwd)`"]),
        ("a=(1 2 3); echo ${a[@]}", ["a=", "echo ${a[@]}"]),
        ("cat <<A <<-'B'; echo z\na; b\nA\n\tc | d\n\tB\nls", ["cat <<A <<-'B'", "echo z", "ls"]),
        ("ls &\nwait", ["ls", "wait"]),
        ("&> log; (&> log ls)", ["&> log", "&> log ls"]),
        ('echo "unclosed', ['echo "unclosed']),
        ("echo é; lś", ["echo é", "lś"]),
        ("a=(') b' c); d", ["a=", "d"]),
        ("echo ${x:-'}'} b; c", ["echo ${x:-'}'} b", "c"]),
        ("cat a<(b); c", ["b", "cat a<(b)", "c"]),
        ("(a)# b\nc", ["a", "c"]),
    ],
)
def test_simple_commands_have_their_spans(text: str, expected: list[str]) -> None:
    assert commands(text) == expected


def test_a_here_document_has_the_span_of_its_body() -> None:
    text = "python3 - <<'EOF' && echo ok\nx = 1\ny\nEOF\nls"
    redirect = next(s for s in simples(parse(text)) if s.redirects).redirects[0]
    assert redirect.body is not None
    assert text[slice(*redirect.body)] == "x = 1\ny\n"


@pytest.mark.parametrize(
    ("text", "programs"),
    [
        ("grep x f", ["grep"]),
        ("ls | grep x", ["grep"]),
        ("cd d && sudo -u me timeout -s KILL 5 env A=1 grep x f", ["grep", "cd"]),
        ("make || grep x f", ["grep"]),
        ("grep x f; exit $?", ["grep"]),
        ("pytest | tail; exit ${PIPESTATUS[0]}", ["pytest"]),
        ("set -o pipefail; grep x f | head", ["head", "grep"]),
        ("bash -c 'ls; grep x f'", ["grep"]),
        ("x=$(grep a f)", ["grep"]),
        ("f() { grep x y; }; f", ["grep"]),
        ("find . | xargs -n 1 grep x", ["grep"]),
        ("for f in *; do grep x $f; done", ["grep"]),
    ],
)
def test_the_deciding_commands_are_found(text: str, programs: list[str]) -> None:
    assert [c.program for c in Action(text).deciders] == programs


PIECES = ["(", ")", "$(", "`", "'", '"', "${", "}", "<<A\n", "\n", "{ ", "if ", "then ", "fi ", "for ", "do ", "done "]
PIECES += [
    "case x in ",
    "esac ",
    "[[ ",
    "]] ",
    "((",
    "))",
    "|",
    "&&",
    "||",
    ";",
    ";;",
    "&",
    ">",
    "<",
    "<(",
    "2>&1",
    "\\",
]
PIECES += ["a", "b=1 ", " ", "#", "é", "\U0001f600", "$x", "!", "f() ", "function g ", "A\n", "bash -c '", "eval "]


@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
@settings(max_examples=400, deadline=None)
def test_any_text_is_read_without_an_error_and_with_spans_in_range(text: str) -> None:
    action = Action(text)
    for call in action.invocations:
        start, end = call.span
        assert 0 <= start <= end <= len(text)
        for word in (*call.words, *call.simple.assignments):
            assert 0 <= word.start < word.end <= len(text)
            assert word.start <= word.inner[0] <= word.inner[1] <= word.end
        for redirect in call.simple.redirects:
            if redirect.body is not None:
                assert 0 <= redirect.body[0] <= redirect.body[1] <= len(text)
    assert action.deciders is not None


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_noise_is_read_without_an_error(text: str) -> None:
    parse(text)


@pytest.mark.parametrize("piece", PIECES)
def test_work_is_linear_in_the_length(piece: str) -> None:
    def short() -> object:
        return parse(piece * 2_000)

    def long() -> object:
        return parse(piece * 32_000)

    most = calls_of(short) * 17
    counted_s = processor_s(lambda: calls_of(long, at_most=most))
    assert not Costs(short).exceed(long, times=16 * 5, first_s=counted_s)  # inside what it calls, as well
