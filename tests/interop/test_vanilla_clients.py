"""Unmodified clients of both generations, in Pythons of their own, against our server.

What is right is what the same client gets from stock OpenEnv 0.10: whole records are compared, not single fields.
"""

from __future__ import annotations

import pytest

from .conftest import DOORS, GENERATIONS, WORLD_OF, Records

CASES = [(g, d, s) for g in GENERATIONS for d in DOORS for s, world in WORLD_OF.items() if world != "terminal"]


@pytest.mark.parametrize(("generation", "door", "scenario"), CASES)
def test_a_vanilla_client_sees_what_stock_openenv_shows(
    records: Records, generation: str, door: str, scenario: str
) -> None:
    expected, found = records[generation, "stock", scenario], records[generation, door, scenario]
    assert "raised" not in expected, expected
    assert "raised" not in found, found["raised"]
    if "unknown_field" in expected:  # the same error and code; ours says in it which field, and why
        refused, told = expected["unknown_field"], found["unknown_field"]
        assert told.replace(": nonsense: Extra inputs are not permitted", "", 1) == refused != told
        found = found | {"unknown_field": refused}
    assert found == expected


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("door", DOORS)
def test_the_ledger_was_played_as_written(records: Records, generation: str, door: str) -> None:
    """The comparison above would hold of two empty records, too."""
    record = records[generation, door, "ledger"]
    assert [step["observation"]["balance"] for step in record["steps"]] == [14, 12]
    assert [step["reward"] for step in record["steps"]] == [1.0, -0.5]
    assert record["steps"][1]["observation"]["note"] == "n-2 é\u2028"
    assert record["state"] == {"episode_id": "ep-7", "step_count": 2, "last_note": "n-2 é\u2028"}
    assert record["failed"] == "Server error: the bank refuses (code: EXECUTION_ERROR)"
    assert "(code: VALIDATION_ERROR)" in record["unknown_field"]
    assert record["after"]["done"] is True and record["other"]["observation"]["balance"] == 0
    played = records[generation, door, "counter"]["plays"]
    assert [play[-2]["observation"]["total"] for play in played] == [28 + seed for seed in range(0, 80, 10)]


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("door", DOORS)
def test_tools_were_called_by_steps_and_by_http(records: Records, generation: str, door: str) -> None:
    stepped, posted = records[generation, door, "echo"], records[generation, door, "echo_http"]
    assert [tool["name"] for tool in stepped["tools"]] == ["echo_message", "echo_with_length", "fail"]
    assert stepped["echo"] == "hé\n" and stepped["length"] == {"message": "four", "length": 4, "before": 1}
    assert "as asked" in stepped["failed"] and "nothing" in stepped["unknown"]
    assert (posted["first"]["before"], posted["second"]["before"]) == (0, 1), "one session"


def test_a_given_out_session_keeps_its_ledger_from_socket_to_socket(records: Records) -> None:
    for generation in GENERATIONS:
        record = records[generation, "root", "attach"]
        balances = [frame["data"]["observation"]["balance"] for frame in record["sockets"][:3]]
        assert balances == [0, 3, 7] and record["client"]["observation"]["balance"] == 12
        assert (record["second"], record["closed"], record["late"]) == ("SESSION_ERROR", True, "SESSION_ERROR")
