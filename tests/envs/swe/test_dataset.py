"""Data sets in the schema of SWE-bench: what loads, what is refused and how it says so, filters, seeds, shards."""

from __future__ import annotations

import builtins
import datetime
import json
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from errata_protocol.errors import InvalidRequest, NotSupported
from swe_bench_lite_env.dataset import (
    LITE,
    Dataset,
    DatasetInvalid,
    EvaluationSplitWarning,
    Instance,
    UnknownInstance,
    UnknownSplit,
    load_dataset,
    read_row,
)

SECRET = "never-to-be-sent"


def row(number: int = 1, **columns: Any) -> dict[str, Any]:
    return {
        "repo": "owner/name",
        "instance_id": f"owner__name-{number}",
        "base_commit": "c" * 40,
        "patch": f"diff {SECRET}",
        "test_patch": f"diff {SECRET}",
        "problem_statement": "It breaks.",
        "hints_text": SECRET,
        "created_at": f"2021-01-{number:02}T00:00:00Z",
        "version": "1.0",
        "environment_setup_commit": "d" * 40,
        "FAIL_TO_PASS": json.dumps(["t.py::test_a"]),
        "PASS_TO_PASS": json.dumps(["t.py::test_b", "t.py::test_c"]),
        **columns,
    }


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def test_the_rows_of_lite_load(lite: Dataset) -> None:
    assert len(lite) == 6
    instance = lite.find("pallets__flask-4992")
    assert instance.repo == "pallets/flask" and instance.version == "2.3"
    assert instance.fail_to_pass == ("tests/test_config.py::test_config_from_file_toml",)
    assert len(instance.pass_to_pass) == 18
    assert lite[0] in lite and "pallets__flask-5063" in lite and "nobody__none-1" not in lite


def test_a_row_of_lite_survives_the_way_back(lite: Dataset, tmp_path: Path) -> None:
    again = load_dataset(jsonl(tmp_path / "again.jsonl", [instance.row() for instance in lite]))
    assert list(again) == list(lite)
    assert all(isinstance(value, str) for instance in again for value in instance.row().values())


def test_jsonl_json_and_parquet_hold_the_same(tmp_path: Path) -> None:
    rows = [row(number) for number in range(1, 5)]
    first = list(load_dataset(jsonl(tmp_path / "a.jsonl", rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps({one["instance_id"]: one for one in rows}))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.json", "b.json", "a.parquet"):
        assert list(load_dataset(tmp_path / name)) == first, name
    assert len(first) == 4


def test_lists_of_tests_may_be_lists_json_or_python(tmp_path: Path) -> None:
    rows = [
        row(1, FAIL_TO_PASS=["t.py::a", "t.py::b[x 'y']"], PASS_TO_PASS=[]),
        row(2, FAIL_TO_PASS='["t.py::a", "t.py::b[x \'y\']"]', PASS_TO_PASS=""),
        row(3, FAIL_TO_PASS="['t.py::a', \"t.py::b[x 'y']\"]", PASS_TO_PASS=None),
    ]
    dataset = load_dataset(jsonl(tmp_path / "a.jsonl", rows))
    assert {instance.fail_to_pass for instance in dataset} == {("t.py::a", "t.py::b[x 'y']")}
    assert {instance.pass_to_pass for instance in dataset} == {()}


def test_optional_columns_may_be_missing_and_others_are_left_alone() -> None:
    smith = {
        "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
        "repo": "swesmith/oauthlib__oauthlib.1fd52536",
        "problem_statement": "It breaks.",
        "patch": "diff",
        "FAIL_TO_PASS": ["t.py::a"],
        "PASS_TO_PASS": ["t.py::b"],
        "image_name": "somewhere",
        "created_at": None,
    }
    instance = read_row(smith)
    assert (instance.base_commit, instance.test_patch, instance.version, instance.created_at) == ("", "", "", "")
    gym = read_row(row(created_at=datetime.datetime(2021, 1, 1), version=2.0, fail_to_pass=["x"], FAIL_TO_PASS=["x"]))
    assert (gym.created_at, gym.version) == ("2021-01-01T00:00:00", "2.0")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"repo": None}, "column repo is missing"),
        ({"repo": "flask"}, "owner/name"),
        ({"instance_id": ""}, "column instance_id is missing"),
        ({"instance_id": "../../etc/passwd"}, "column instance_id"),
        ({"instance_id": "a b"}, "column instance_id"),
        ({"problem_statement": None}, "column problem_statement is missing"),
        ({"problem_statement": ["x"]}, "column problem_statement holds list"),
        ({"FAIL_TO_PASS": None}, "column FAIL_TO_PASS names no test"),
        ({"FAIL_TO_PASS": "[]"}, "column FAIL_TO_PASS names no test"),
        ({"FAIL_TO_PASS": "test_a"}, "column FAIL_TO_PASS is text that is no list"),
        ({"FAIL_TO_PASS": "[1]"}, "column FAIL_TO_PASS has to be a list"),
        ({"FAIL_TO_PASS": '{"a": 1}'}, "column FAIL_TO_PASS has to be a list"),
        ({"PASS_TO_PASS": 3}, "column PASS_TO_PASS has to be a list"),
        ({"created_at": "yesterday"}, "column created_at"),
        ({"eval_type": "some"}, "column eval_type"),
        ({"patch": {"a": 1}}, "column patch holds dict"),
    ],
)
def test_what_is_wrong_names_the_row_and_the_column(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [row(1), row(2, **columns)])
    with pytest.raises(DatasetInvalid, match=r"a\.jsonl row 2: ") as caught:
        load_dataset(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_all_bad_rows_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [row(number, repo="") for number in range(1, 10)] + [["no object"]])
    with pytest.raises(DatasetInvalid, match=r"row 1: .*row 5: .*and 5 more"):
        load_dataset(path)


def test_an_instance_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match=r"row 3: column instance_id repeats a\.jsonl row 1"):
        load_dataset(jsonl(tmp_path / "a.jsonl", [row(1), row(2), row(1)]))
    with pytest.raises(DatasetInvalid, match="occur more than once"):
        Dataset([read_row(row(1)), read_row(row(1))])


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a"', DatasetInvalid),
        ("a.jsonl", b"\xff\xfe", DatasetInvalid),
        ("a.json", b"[", DatasetInvalid),
        ("a.json", b"3", DatasetInvalid),
        ("a.parquet", b"PAR1 no", DatasetInvalid),
        ("a.csv", b"a,b", InvalidRequest),
    ],
)
def test_a_file_that_cannot_be_read_says_so(
    tmp_path: Path, name: str, content: bytes, error: type[InvalidRequest]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=name):
        load_dataset(tmp_path / name)


def test_a_missing_file_is_not_taken_for_a_name_of_the_hub(tmp_path: Path) -> None:
    for name in ("rows.jsonl", str(tmp_path / "rows"), "./rows"):
        with pytest.raises(InvalidRequest, match="no such file"):
            load_dataset(name)


def test_the_split_test_is_loaded_only_by_name_and_with_a_warning(tmp_path: Path) -> None:
    jsonl(tmp_path / "dev.jsonl", [row(1)])
    jsonl(tmp_path / "data/test-00000-of-00002.jsonl", [row(2)])
    jsonl(tmp_path / "data/test-00001-of-00002.jsonl", [row(3)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_dataset(tmp_path).ids == ["owner__name-1"]
        assert load_dataset(tmp_path, "dev").splits.keys() == {"dev"}
    with pytest.warns(EvaluationSplitWarning, match="is for evaluation"):
        assert load_dataset(tmp_path, "test").ids == ["owner__name-2", "owner__name-3"]
    (tmp_path / "dev.jsonl").unlink()
    with pytest.raises(UnknownSplit, match="ask for it by name"):
        load_dataset(tmp_path)
    with pytest.raises(UnknownSplit, match="no split 'train': it has test"):
        load_dataset(tmp_path, "train")


def test_a_file_named_after_the_split_test_and_rows_that_say_it_are_for_evaluation_too(tmp_path: Path) -> None:
    with pytest.raises(UnknownSplit):
        load_dataset(jsonl(tmp_path / "test.jsonl", [row(1)]))
    mixed = jsonl(tmp_path / "rows.jsonl", [row(1, split="test"), row(2, split="train"), row(3)])
    assert load_dataset(mixed).ids == ["owner__name-2", "owner__name-3"]
    assert [*load_dataset(mixed).splits] == ["train", "local"]
    with pytest.warns(EvaluationSplitWarning):
        assert load_dataset(mixed, "test").ids == ["owner__name-1", "owner__name-3"]


def test_a_directory_without_data_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no \.jsonl"):
        load_dataset(tmp_path)


def test_instances_are_chosen_by_repository_version_id_and_time(lite: Dataset) -> None:
    assert {instance.repo for instance in lite.select(repos=["pallets/flask"])} == {"pallets/flask"}
    assert lite.select(repos=["pallets/flask"], versions=["2.0"]).ids == ["pallets__flask-4045"]
    assert lite.select(instance_ids=["mwaskom__seaborn-3407"]).ids == ["mwaskom__seaborn-3407"]
    early = lite.select(created_before="2022-01-01")
    late = lite.select(created_from=datetime.date(2022, 1, 1))
    assert len(early) == 2 and len(late) == 4 and not {*early.ids} & {*late.ids}
    assert lite.select(where=lambda instance: "3407" in instance.instance_id).ids == ["mwaskom__seaborn-3407"]
    with pytest.raises(UnknownInstance, match="no instance 'x'"):
        lite.select(instance_ids=["x"])
    with pytest.raises(InvalidRequest, match="created_from is 'soon'"):
        lite.select(created_from="soon")


def test_a_range_of_time_is_half_open_and_without_a_time_a_row_is_in_none() -> None:
    dataset = Dataset([read_row(row(1)), read_row(row(2)), read_row(row(3, created_at=""))])
    assert dataset.select(created_from="2021-01-02").ids == ["owner__name-2"]
    assert dataset.select(created_before="2021-01-02T00:00:00+00:00").ids == ["owner__name-1"]
    assert dataset.select(created_from="2021-01-02T01:00:00+02:00").ids == ["owner__name-2"]


def test_a_seed_gives_one_order_whatever_else_is_chosen() -> None:
    dataset = Dataset([read_row(row(number)) for number in range(1, 29)])
    order = dataset.shuffled(7).ids
    assert order != dataset.ids and sorted(order) == sorted(dataset.ids)
    assert dataset.shuffled(7).ids == Dataset(reversed(dataset[:])).shuffled(7).ids == order
    assert dataset.shuffled(8).ids != order
    odd = dataset.select(where=lambda instance: int(instance.instance_id.split("-")[1]) % 2 == 1)
    assert odd.shuffled(7).ids == [one for one in order if one in odd]


@pytest.mark.parametrize("count", [1, 2, 3, 28, 40])
def test_shards_share_nothing_and_leave_nothing_out(count: int) -> None:
    dataset = Dataset([read_row(row(number)) for number in range(1, 29)])
    shards = [dataset.shard(index, count) for index in range(count)]
    assert sorted(one for shard in shards for one in shard.ids) == sorted(dataset.ids)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    with pytest.raises(InvalidRequest, match="shards of"):
        dataset.shard(count, count)


def test_only_three_values_of_an_instance_may_leave_the_server(lite: Dataset) -> None:
    instance = read_row(row(1))
    assert instance.public() == {
        "instance_id": "owner__name-1",
        "repo": "owner/name",
        "problem_statement": "It breaks.",
    }
    for text in (repr(instance), str(instance), repr(Dataset([instance])), f"{instance!r}"):
        assert SECRET not in text and "test_a" not in text
    for real in lite:
        assert set(real.public()) == {"instance_id", "repo", "problem_statement"}


def test_excluded_tests_leave_pass_to_pass() -> None:
    instance = read_row(row(1))
    assert instance.excluding(["t.py::test_b"]).pass_to_pass == ("t.py::test_c",)
    assert instance.excluding([]) == instance
    with pytest.raises(InvalidRequest, match="is not in PASS_TO_PASS"):
        instance.excluding(["t.py::test_a"])


def test_the_digest_changes_with_what_is_graded_and_with_nothing_else() -> None:
    digest = read_row(row(1)).digest
    for name in ("base_commit", "patch", "test_patch", "version"):
        assert read_row(row(1, **{name: "other"})).digest != digest
    assert read_row(row(1, PASS_TO_PASS=["t.py::test_b"])).digest != digest
    assert read_row(row(1, hints_text="other", problem_statement="other", split="dev")).digest == digest


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a package look as if it were not installed."""

    def hide(name: str) -> None:
        real = builtins.__import__

        def refuse(module: str, *rest: Any, **named: Any) -> Any:
            if module.partition(".")[0] == name:
                raise ImportError(f"No module named {module!r}")
            return real(module, *rest, **named)

        for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setattr(builtins, "__import__", refuse)

    return hide


def test_parquet_without_pyarrow_names_the_command_that_installs_it(
    tmp_path: Path, without: Callable[[str], None]
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    without("pyarrow")
    with pytest.raises(NotSupported, match=r"needs pyarrow: pip install .*\[parquet\]"):
        load_dataset(tmp_path / "a.parquet")


def test_a_name_of_the_hub_without_datasets_names_the_command_that_installs_it(without: Callable[[str], None]) -> None:
    without("datasets")
    with pytest.raises(NotSupported, match=r"needs the package datasets: pip install .*\[swe\]"):
        load_dataset("lite", "test")


def fake_hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, list[dict[str, Any]]] | None) -> list[str]:
    """Stand in for the package ``datasets``; without splits the hub cannot be reached."""
    asked: list[str] = []
    hub = types.ModuleType("datasets")

    def names(name: str) -> list[str]:
        asked.append(name)
        if splits is None:
            raise ConnectionError("Couldn't reach\nthe hub")
        return list(splits)

    hub.get_dataset_split_names = names  # type: ignore[attr-defined]
    hub.load_dataset = lambda name, split: (splits or {})[split]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return asked


def test_a_name_of_the_hub_loads_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_hub(monkeypatch, {"dev": [row(1)], "test": [row(2), row(3)]})
    assert load_dataset("lite").ids == ["owner__name-1"]
    with pytest.warns(EvaluationSplitWarning):
        assert load_dataset("SWE-Gym/SWE-Gym", "test").ids == ["owner__name-2", "owner__name-3"]
    assert asked == [LITE, "SWE-Gym/SWE-Gym"]
    with pytest.raises(UnknownSplit, match="no split 'train': it has dev, test"):
        load_dataset("lite", "train")


def test_without_a_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, None)
    with pytest.raises(NotSupported, match=r"hf download --repo-type dataset SWE-bench/SWE-bench_Lite --local-dir DIR"):
        load_dataset("lite")


def test_an_instance_is_immutable() -> None:
    instance = read_row(row(1))
    with pytest.raises(AttributeError):
        instance.patch = "other"  # type: ignore[misc]
    assert isinstance(instance, Instance)
