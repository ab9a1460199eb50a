"""swe_bench_lite in TRL: rows of a split, tools as published, an episode that is graded; no row holds a solution."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_protocol.errors import InvalidRequest, ServiceError
from errata_trainer.recipes.trl import EvaluationSplitWarning, dataset, environment_factory
from swe_bench_lite_env import SPEC
from swe_bench_lite_env.server import offered
from swe_bench_lite_env.server.offered import bundled
from tests.envs.swe.served import SECRET, TOKENS, offer_secret, serving
from tests.envs.swe.sessions import NAME, instance

pytestmark = [pytest.mark.training, pytest.mark.sandbox]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "store"))
    offer_secret(tmp_path, monkeypatch)
    with serving() as (url, _):
        yield url
    offered._offered.cache_clear()


def test_rows_name_instances_and_hold_nothing_else(url: str) -> None:
    for split in (None, "bundled"):
        rows = dataset(url, "swe_bench_lite", split=split)
        assert rows.column_names == ["prompt", "instance_id"]
        assert rows["instance_id"] == [*bundled()[0].ids[:7], SECRET]
    assert rows[0]["prompt"] == [{"role": "user", "content": rows[0]["prompt"][0]["content"]}]
    text = json.dumps(rows.to_list())
    assert not any(token in text for token in TOKENS.values())
    own = dataset(url, "swe_bench_lite", prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": ""}])
    assert [message["role"] for message in own[0]["prompt"]] == ["system", "user"]


def test_a_rollout_begins_on_the_instance_of_its_row_and_is_graded(url: str) -> None:
    rows = dataset(url, "swe_bench_lite")
    factory = environment_factory(url, "swe_bench_lite")
    assert [name for name, _ in inspect.getmembers(factory, inspect.isfunction) if not name.startswith("_")] == sorted(
        [*(tool["name"] for tool in SPEC.tools), "reset", "get_reward"]
    )
    student = factory()
    row = next(row for row in rows if row["instance_id"] == NAME)
    text = student.reset(**row)
    assert instance().problem_statement.strip() in text and "/testbed" in text
    assert "orphans" in student.search(pattern="orphans", path="src")
    assert student.apply_patch(patch=instance().patch) == "[applied]"
    assert student.get_reward() == 1.0, "an episode that the student leaves open is graded"
    student.reset(instance_id=NAME)
    assert "[submitted]" in student.submit() and student.get_reward() == 0.0
    student._runner.close()


def test_rows_of_an_evaluation_split_name_it_and_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    row = instance().row() | {"instance_id": "own__test-1", "split": "test"}
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps(row | {"instance_id": "b", "split": "dev"})
    )
    (tmp_path / "recipes.json").write_text("[]")
    monkeypatch.setenv("ERRATA_SWE_DATASET", str(tmp_path / "rows.jsonl"))
    monkeypatch.setenv("ERRATA_SWE_RECIPES", str(tmp_path / "recipes.json"))
    with pytest.raises(InvalidRequest, match="has the splits dev, bundled: name one"):
        dataset(url, "swe_bench_lite")
    with pytest.warns(EvaluationSplitWarning, match="cannot be evaluated with it"):
        found = dataset(url, "swe_bench_lite", split="test")
    assert found.to_list()[0] | {"prompt": ""} == {"prompt": "", "instance_id": "own__test-1", "split": "test"}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"split": "none"}, InvalidRequest, "400"),
        ({"env": "other"}, InvalidRequest, "no environment 'other' there"),
        ({"columns": ["task"]}, InvalidRequest, "have instance_id, prompt: name what its reset takes"),
    ],
)
def test_what_makes_no_rows_is_refused(url: str, arguments: dict[str, object], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        dataset(url, **{"env": "swe_bench_lite", **arguments})


def test_a_server_that_is_not_there_is_said_so() -> None:
    with pytest.raises(ServiceError, match="is the server running there"):
        dataset("http://127.0.0.1:9", "swe_bench_lite")
