"""The terminal environment under unmodified clients of both generations, on real sandboxes."""

from __future__ import annotations

import pytest

from .conftest import DOORS, GENERATIONS, Records

pytestmark = pytest.mark.sandbox
CASES = [(g, d) for g in GENERATIONS for d in DOORS]


@pytest.mark.parametrize(("generation", "door"), CASES)
def test_a_task_is_played_to_its_reward(records: Records, generation: str, door: str) -> None:
    record = records[generation, door, "terminal"]
    assert "raised" not in record, record["raised"]
    assert "750" in record["reset"]["observation"]["instruction"]
    assert (record["wrote"]["done"], record["read"]["observation"]["content"]) == (False, "a\né")
    assert record["again"]["observation"]["stdout"] == "/workspace/site\nme\n"
    assert record["state"]["episode_id"] == "t-1" and record["state"]["task_id"] == "file-permissions"
    assert record["state"]["step_count"] == 6, "state counts every step and nothing else"
    assert (record["submit"]["reward"], record["submit"]["done"]) == (1.0, True)
    assert "VALIDATION_ERROR" in record["over"]


@pytest.mark.parametrize(("generation", "door"), CASES)
def test_markers_reach_a_vanilla_client_in_observation_and_metadata(
    records: Records, generation: str, door: str
) -> None:
    record = records[generation, door, "terminal"]
    failed = record["failed"]["observation"]
    assert failed["exit_code"] == 1 and failed["error_kind"] == "path_not_found"
    assert failed["error_site"]["t"] == 1 and failed["hint_template_key"]
    assert failed["metadata"]["error_kind"] == "path_not_found"
    assert record["no_tool"]["observation"]["error_kind"] == "tool_not_found"
    assert record["again"]["observation"]["error_kind"] is None


@pytest.mark.parametrize(("generation", "door"), CASES)
def test_the_blocking_client_has_a_bare_shell(records: Records, generation: str, door: str) -> None:
    record = records[generation, door, "terminal_sync"]
    assert "raised" not in record, record["raised"]
    step = record["step"]["observation"]
    assert (step["stdout"], step["stderr"], step["exit_code"]) == ("out\n", "err\n", 3)
    assert record["reset"]["observation"]["task_id"] == "" and record["state"]["step_count"] == 1
