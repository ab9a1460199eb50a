"""Records in files come back as they were, in either format."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errata_protocol.markers import ErrorSite
from errata_protocol.rollouts import ErrorMarker
from errata_trainer import Call, DpoPair, Rollout, SdpoItem, Turn, read_records, write_records
from errata_trainer.rollouts.record_files import Record, from_json, to_json

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
TEXT = st.text(max_size=8)
FLOAT = st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
MARKERS = st.builds(
    ErrorMarker,
    error_kind=TEXT,
    hint_template_key=st.none() | TEXT,
    severity=st.sampled_from(["error", "warning"]) | st.none(),
    error_site=st.none()
    | st.builds(
        ErrorSite,
        t=st.integers(0, 9),
        action_span=st.none() | st.just((1, 3)),
        file=TEXT,
        line=st.none() | st.integers(1, 9),
        message=TEXT,
    ),
)
CALLS = st.builds(
    Call, TEXT, st.dictionaries(TEXT, JSON, max_size=3), st.none() | st.integers(0, 99), st.none() | MARKERS
)
TURNS = st.builds(Turn, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.lists(CALLS, max_size=2).map(tuple))
ROLLOUTS = st.builds(
    Rollout,
    IDS,
    IDS,
    st.lists(st.integers(0, 1), max_size=4).map(tuple),
    st.lists(TURNS, max_size=2).map(tuple),
    eid=st.none() | TEXT,
    environment=st.none() | TEXT,
    reward=st.none() | FLOAT,
    logprobs=st.none() | st.lists(FLOAT, max_size=3).map(tuple),
    truncated=st.booleans(),
    lost=st.none() | TEXT,
    task=st.dictionaries(TEXT, JSON, max_size=3),
)
ITEMS = st.builds(
    SdpoItem, st.integers(0, 9), IDS, IDS, IDS, IDS, st.integers(0, 9), FLOAT, hint_template_key=st.none() | TEXT
)
PAIRS = st.builds(
    DpoPair,
    IDS,
    IDS,
    IDS,
    ref_chosen=st.none() | FLOAT,
    ref_rejected=st.none() | FLOAT,
    reference=st.none() | TEXT,
    weight=FLOAT,
    eid=st.none() | TEXT,
    t=st.none() | st.integers(0, 9),
    votes=st.dictionaries(TEXT, st.none() | TEXT, max_size=3),
)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_records_come_back_as_they_were(tmp_path: Path, suffix: str, data: st.DataObject) -> None:
    kind, strategy = data.draw(st.sampled_from([(Rollout, ROLLOUTS), (SdpoItem, ITEMS), (DpoPair, PAIRS)]))
    records: list[Any] = data.draw(st.lists(strategy, max_size=3))
    path = tmp_path / f"records{suffix}"
    assert write_records(path, iter(records)) == len(records)
    assert repr(list(read_records(path, kind))) == repr(records)  # NaN is itself in a repr


def test_kinds_stand_together_in_lines_of_json_but_not_in_parquet(tmp_path: Path) -> None:
    records = [Rollout((1,), (2,), (1,)), SdpoItem(0, (1, 2), (0,), (0,), (2,))]
    write_records(tmp_path / "a.jsonl", records)
    assert list(read_records(tmp_path / "a.jsonl", SdpoItem)) == records[1:]
    with pytest.raises(ValueError, match="one kind of record"):
        write_records(tmp_path / "a.parquet", records)
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]  # nothing half-written stays


def test_a_parquet_file_says_its_schema_and_can_be_filtered_by_error(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="without pyarrow there is no Parquet")
    call = Call("run", {"command": "a"}, 1, ErrorMarker(error_kind="timeout", severity="error"))
    write_records(tmp_path / "a.parquet", [Rollout((1,), (2,), (1,), (Turn(0, 0, 1, (call,)),), reward=math.nan)])
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.schema.metadata[b"errata_schema_version"] == b"1"
    assert table["turns"][0].as_py()[0]["error_kind"] == "timeout"


def test_a_field_of_a_later_writer_is_left_out_and_another_version_refused() -> None:
    row = to_json(DpoPair((1,), (2,), (3,)))
    assert from_json({**row, "more": 1}) == DpoPair((1,), (2,), (3,))
    with pytest.raises(ValueError, match="schema version 2"):
        from_json({**row, "schema_version": 2})
    with pytest.raises(ValueError, match="no kind of record"):
        from_json({**row, "record": "x"})
    with pytest.raises(ValueError, match="cannot be made"):
        from_json({name: value for name, value in row.items() if name != "context_ids"})


def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(to_json(Rollout((1,), (2,), (1,)))) + '\n{"schema_version": 1, "rec')
    with pytest.raises(ValueError, match=r"a\.jsonl, row 1: no JSON"):
        list(read_records(path, Rollout))
    for act in (lambda: write_records(tmp_path / "a.csv", []), lambda: list(read_records(tmp_path / "a.csv", Rollout))):
        with pytest.raises(ValueError, match=r"\.jsonl or \.parquet"):
            act()


def test_the_examples_of_the_documentation_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), "docs/rollouts.md", "exec"), {})


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[parquet\]"):
        write_records(tmp_path / "a.parquet", [])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_number_that_json_has_not_is_text_wherever_a_student_wrote_it(tmp_path: Path, suffix: str) -> None:
    call = Call("run", {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1, 2.5)}, 1)
    record = Rollout((1,), (2,), (1,), (Turn(0, 0, 1, (call,)),), task={"limit": math.inf})
    path = tmp_path / f"a{suffix}"
    write_records(path, [record])
    (read,) = read_records(path, Rollout)
    assert read.turns[0].calls[0].arguments == {"a": "NaN", "b": ["Infinity", {"c": "-Infinity"}], "d": [1, 2.5]}
    assert read.task == {"limit": "Infinity"}
    if suffix == ".jsonl":

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("task", "message"),
    [({"a": {1: 2}}, "task.a has the key 1"), ({2: 1}, "task has the key 2"), ({"a": [{3}]}, r"task\.a\[0\] is a set")],
)
def test_a_task_that_json_has_not_is_refused_with_its_place(
    tmp_path: Path, suffix: str, task: dict[Any, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        write_records(tmp_path / f"a{suffix}", [Rollout((1,), (2,), (1,), task=task)])
    assert not list(tmp_path.iterdir())


def test_what_is_no_record_or_no_kind_is_refused_with_the_ones_there_are(tmp_path: Path) -> None:
    kinds = "Rollout, SdpoItem, DpoPair"
    for suffix in (".jsonl", ".parquet"):
        path = tmp_path / f"a{suffix}"
        with pytest.raises(TypeError, match=rf"{path.name}, record 0: a dict is no record: one of {kinds}"):
            write_records(path, [{}])  # type: ignore[list-item]
        with pytest.raises(TypeError, match=f"one of {kinds}"):
            list(read_records(path, dict))  # type: ignore[type-var]
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        to_json(Rollout((1.7,), (), ()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^{tmp_path}/a.parquet: .*record 1 is of dpo_pair"):
        write_records(tmp_path / "a.parquet", [Rollout((), (), ()), DpoPair((), (), ())])


def test_a_mask_of_bools_is_written_as_numbers(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", [Rollout((1,), (2,), (True,))])
    assert list(read_records(tmp_path / "a.jsonl", Rollout)) == [Rollout((1,), (2,), (1,))]


TURN = {"index": 0, "start": 0, "stop": 1, "calls": []}
CALL = {"name": "run", "arguments": {}, "t": 1, "marker": None}
ROLLOUT, ITEM, PAIR = Rollout((1,), (2,), (1,)), SdpoItem(0, (1, 2), (0,), (0,), (2,)), DpoPair((1,), (2,), (3,))


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (ROLLOUT, {"prompt_ids": "123"}),
        (ROLLOUT, {"prompt_ids": [1.7]}),
        (ROLLOUT, {"prompt_ids": [math.inf]}),
        (ROLLOUT, {"prompt_ids": ["1"]}),
        (ROLLOUT, {"mask": [True]}),
        (ROLLOUT, {"mask": None}),
        (ROLLOUT, {"truncated": "no"}),
        (ROLLOUT, {"truncated": None}),
        (ROLLOUT, {"eid": 5}),
        (ROLLOUT, {"reward": "1.0"}),
        (ROLLOUT, {"reward": True}),
        (ROLLOUT, {"reward": 10**400}),
        (ROLLOUT, {"logprobs": "NaN"}),
        (ROLLOUT, {"logprobs": [None]}),
        (ROLLOUT, {"task": [["a", 1]]}),
        (ROLLOUT, {"turns": {}}),
        (ROLLOUT, {"turns": [TURN | {"start": "0"}]}),
        (ROLLOUT, {"turns": [TURN | {"calls": {}}]}),
        (ROLLOUT, {"turns": [TURN | {"calls": [CALL | {"name": None}]}]}),
        (ROLLOUT, {"turns": [TURN | {"calls": [CALL | {"arguments": []}]}]}),
        (ROLLOUT, {"turns": [TURN | {"calls": [CALL | {"t": 1.0}]}]}),
        (ITEM, {"turn": "0"}),
        (ITEM, {"weight": None}),
        (PAIR, {"t": True}),
        (PAIR, {"votes": {"a": 1}}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else type(value).__name__,
)
def test_a_field_of_another_type_is_refused_not_made_to_fit(record: Record, wrong: dict[str, Any]) -> None:
    assert from_json(to_json(record)) == record
    with pytest.raises(ValueError, match="cannot be made of this row"):
        from_json(to_json(record) | wrong)


def test_arguments_may_be_nested_as_deep_as_a_students_text_can_be_read(tmp_path: Path) -> None:
    arguments = json.loads('{"a": ' + "[" * 800 + "]" * 800 + "}")
    record = Rollout((1,), (2,), (1,), (Turn(0, 0, 1, (Call("run", arguments),)),))
    write_records(tmp_path / "a.jsonl", [record])
    assert (tmp_path / "a.jsonl").read_text().count("[[") >= 400
