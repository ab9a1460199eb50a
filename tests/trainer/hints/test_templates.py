"""Hints from templates: one for every kind of error, concrete where something is known, and never a secret."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from failing import TOOLS, failing, marker_for
from hypothesis import given, settings
from hypothesis import strategies as st

from errata_protocol.detect import detect
from errata_protocol.markers import HINT_TEMPLATE_KEYS, ErrorKind
from errata_protocol.rollouts import ErrorMarker
from errata_trainer import build_rollout
from errata_trainer.hints import FailedTurn, Hinter, HintPack, TemplateHinter, approximate_tokens, leaks, neutral
from errata_trainer.hints.lint import lint, main

DATA = Path(__file__).parents[2] / "protocol" / "data"
PACK = HintPack.load(installed=False)


def pack(tmp_path: Path, text: str, environment: str = "") -> HintPack:
    directory = tmp_path / environment
    directory.mkdir(exist_ok=True)
    (directory / "own.toml").write_text(text)
    return HintPack.load(tmp_path, installed=False)


def test_the_shipped_pack_has_nothing_wrong() -> None:
    assert lint(PACK) == []


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_there_is_a_hint_for_every_kind_when_nothing_else_is_known(kind: ErrorKind) -> None:
    hinter = TemplateHinter(PACK)
    assert isinstance(hinter, Hinter)
    hint = hinter.hint(failing(marker_for(kind), name="", arguments={}))
    assert hint is not None
    assert (hint.key, hint.source, hint.version) == (HINT_TEMPLATE_KEYS[kind], "template", PACK.version)
    assert hint.text.startswith("Hint for your next action: ")
    assert "{" not in hint.text and "None" not in hint.text


def test_a_hint_names_what_is_known() -> None:
    marker = marker_for(
        "path_not_found", action_field="command", action_span=(4, 9), message="cat: a.txt: No such file"
    )
    hint = TemplateHinter(PACK).hint(failing(marker))
    assert hint is not None and "`a.txt` does not exist" in hint.text


def test_a_call_that_does_not_fit_is_told_what_does() -> None:
    hinter = TemplateHinter(PACK)
    unknown = hinter.hint(failing(marker_for("tool_not_found"), "grep", {}, t=None))
    assert unknown is not None and "no tool `grep`" in unknown.text and "run, submit" in unknown.text
    wrong = hinter.hint(failing(marker_for("invalid_arguments"), "run", {"cmd": "ls"}, t=None))
    assert wrong is not None and "`run` takes these arguments: command, timeout_s (optional)" in wrong.text
    messages = [{"role": "assistant", "content": "<tool_call>{"}]
    rollout = build_rollout([1], [2], None, messages, opening="<tool_call>")
    turn = rollout.turns[0]
    assert turn.failed is not None
    malformed = hinter.hint(FailedTurn(rollout, turn, turn.failed, tools=TOOLS))
    assert malformed is not None and "one complete JSON object" in malformed.text and "run, submit" in malformed.text


def test_a_warning_and_a_turn_without_an_error_get_no_hint() -> None:
    hinter = TemplateHinter(PACK)
    assert hinter.hint(failing(marker_for("output_truncated", "warning"))) is None
    assert hinter.hint(failing(None)) is None
    assert hinter.counts == {"none:no_error": 2}


def test_an_environments_own_kind_without_a_template_is_counted() -> None:
    hinter = TemplateHinter(PACK)
    assert hinter.hint(failing(ErrorMarker(error_kind="own"))) is None
    assert hinter.counts == {"none:no_template": 1}


def test_every_recorded_error_has_a_hint_within_the_budget() -> None:
    hinter = TemplateHinter(PACK)
    seen = 0
    for name in ("outputs.jsonl", "outputs2.jsonl"):
        for line in (DATA / name).read_text().splitlines():
            row = json.loads(line)
            found = detect(
                row["command"],
                row["exit_code"],
                row["stdout"],
                row["stderr"],
                timed_out=row["timed_out"],
                cwd=row["cwd"],
            )
            if found.error_kind is None or found.severity == "warning":
                continue
            marker = ErrorMarker(
                error_kind=found.error_kind, hint_template_key=found.hint_template_key, error_site=found.error_site
            )
            observation = {"cwd": row["cwd"], "exit_code": row["exit_code"], "time_limit_s": 5.0}
            turn = failing(marker, arguments={"command": row["command"]}, observation=observation)
            hint = hinter.hint(turn)
            assert hint is not None, row["id"]
            assert approximate_tokens(hint.text) <= hinter.max_tokens
            assert neutral(hint.text, 10_000) == hint.text, row["id"]
            seen += 1
    assert seen > 400


def test_an_environments_own_templates_go_first_and_the_general_ones_follow(tmp_path: Path) -> None:
    own = pack(tmp_path, '["fs.missing"]\ntexts = ["Look into `{cwd}` first."]', "office")
    assert own.version != PACK.version
    assert lint(own) == []
    hinter = TemplateHinter(own)
    marker = marker_for("path_not_found")
    told = hinter.hint(failing(marker, environment="office", observation={"cwd": "/desk"}))
    assert told is not None and told.text.endswith("Look into `/desk` first.")
    assert hinter.hint(failing(marker, environment="office")) == hinter.hint(failing(marker))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('["fs.missing"]\ntexts = ["`{secret}` is it.", "Look."]', "unknown slots secret"),
        ('["fs.missing"]\ntexts = ["Look.", "`{file}` is missing.", "No."]', "never taken"),
        ('["exec.own"]\ntexts = ["`{file}`."]', "the last text has slots"),
        ('["fs.missing"]\ntexts = ["<|im_end|> Look."]', "chat tokens"),
        ('["fs.missing"]\ntexts = ["Read the hidden tests."]', "must not be about grading"),
        (f'["fs.missing"]\ntexts = ["{"look " * 90}."]', "tokens, at most"),
        ('["fs.missing"]\ntexts = ["look"]', "no sentence"),
    ],
)
def test_lint_finds_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    assert any(problem in line for line in lint(pack(tmp_path, text)))


def test_lint_names_a_key_without_a_template() -> None:
    some = HintPack({"": {key: value for key, value in PACK.templates[""].items() if key != "fs.missing"}}, "1")
    assert lint(some) == ["fs.missing: there is no template for all environments"]


@pytest.mark.parametrize(
    "text",
    ["not toml", '["a"]\ntext = ["a"]', '["a"]\ntexts = "a"', '["a"]\ntexts = ["{a!r}"]', '["a"]\ntexts = ["{"]'],
)
def test_a_file_of_another_form_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("own.toml")):
        pack(tmp_path, text)


def test_a_hint_too_long_gives_way_to_a_shorter_one() -> None:
    marker = marker_for("patch_failed", file="x" * 100, line=3)
    hinter = TemplateHinter(PACK, max_tokens=80)
    hint = hinter.hint(failing(marker))
    assert hint is not None and "xxx" not in hint.text
    nothing = TemplateHinter(PACK, max_tokens=5)
    assert nothing.hint(failing(marker)) is None
    assert nothing.counts == {"none:over_budget": 1}


def test_a_hint_that_tells_a_secret_gives_way_to_one_that_does_not() -> None:
    task = {"instance_id": "x", "FAIL_TO_PASS": '["tests/test_a.py::test_b"]', "patch": "+    total = price * count\n"}
    marker = marker_for("test_failure", test_id="tests/test_a.py::test_b", message="assert 1 == 2")
    hint = TemplateHinter(PACK).hint(failing(marker, task=task))
    assert hint is not None and "test_b" not in hint.text
    marker = marker_for("runtime_error", message="in f: total  = price * COUNT")
    hint = TemplateHinter(PACK).hint(failing(marker, task=task, arguments={}))
    assert hint is not None and "price" not in hint.text


@pytest.mark.parametrize(
    ("secret", "told"),
    [
        ("42", True),
        ("return int(value) + 1", True),
        ("diff --git a/x b/x\n@@ -1 +1 @@\n-    return int(value)\n+    return  INT(value) + 1\n", True),
        ("first find out that the return value is an int", True),
        ("return", True),
        ("eturn int", False),
        ("the value is returned as an int", False),
        (" ", False),
    ],
)
def test_what_counts_as_a_leak(secret: str, told: bool) -> None:
    hint = "At line 42 find out that the return value is right: use `return int(value) + 1`."
    assert bool(leaks(hint, [secret])) is told


TEXT = st.text(max_size=300) | st.lists(
    st.sampled_from(
        ["<|im_end|>", "<", "|", "<|", "|>", "[INST]", "</s>", "`", "\u202e", "\x00", "\x1b[31m", "\n", "{x}"]
    )
).map("".join)


@settings(max_examples=200, deadline=None)
@given(TEXT, TEXT, TEXT, st.sampled_from(list(ErrorKind)))
def test_what_an_agent_writes_cannot_leave_its_place(file: str, message: str, command: str, kind: ErrorKind) -> None:
    span = (0, len(command))
    marker = marker_for(kind, file=file, line=1, message=message, action_field="command", action_span=span)
    turn = failing(marker, arguments={"command": command}, observation={"cwd": file, "limit_hit": message})
    hint = TemplateHinter(PACK, max_tokens=400).hint(turn)
    assert hint is not None
    assert hint.text.isprintable() and "\n" not in hint.text
    assert len(hint.text) < 900
    assert not re.search(r"<[|/a-zA-Z_!]|\|>|\[/?INST\]", hint.text)
    assert hint.text.count("`") % 2 == 0


@settings(max_examples=300, deadline=None)
@given(TEXT, st.integers(8, 80))
def test_neutral_text_is_bounded_and_stays_what_it_is(text: str, limit: int) -> None:
    shown = neutral(text, limit)
    assert len(shown) <= limit
    assert neutral(shown, limit) == shown
    assert not re.search(r"<[|/a-zA-Z_!]|\|>", shown)


def test_a_tokenizers_own_tokens_are_broken_too() -> None:
    assert neutral("a ▁SEP▁ b", 50, tokens=["▁SEP▁"]) == "a ▁ SEP▁ b"
    assert neutral("keep\ta\n\nline", 50, lines=True) == "keep a\n\nline"
    assert neutral("x" * 30 + "end", 12) == "xxxxx … xend"


def test_the_example_of_the_documentation_holds() -> None:
    text = (Path(__file__).parents[3] / "docs" / "hints.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "docs/hints.md", "exec"), {})


def test_the_linter_says_which_directory_or_file_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.toml").write_text("no")
    (tmp_path / "graders").mkdir()
    (tmp_path / "graders" / "a.toml").write_text('["fs.missing"]\ntexts = ["Read the hidden tests."]')
    for name, status, told in (
        ("missing", 2, "missing: there is no such directory"),
        ("broken/a.toml", 2, "a.toml: there is no such directory"),
        ("broken", 2, "a.toml: "),
        ("graders", 1, "must not be about grading"),
    ):
        monkeypatch.setattr("sys.argv", ["lint", str(tmp_path / name)])
        assert main() == status
        assert told in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["lint"])
    assert main() == 0
