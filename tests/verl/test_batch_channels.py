"""What channels 2 and 3 find in batches of VeRL's rollouts, without its processes: a real server, scripted students."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from errata_trainer.assembly.counterfactual import Calls, CounterfactualCheck
from errata_trainer.channels.schedules import linear
from errata_trainer.monitoring.metrics import combined
from errata_trainer.recipes.verl.agent_loop import played_of
from errata_trainer.recipes.verl.batch_channels import BatchChannels
from errata_trainer.recipes.verl.options import ChannelOptions, EpisodeOptions
from errata_trainer.recipes.verl.records import HANDED_OVER, Row
from errata_trainer.rollouts.rollout import DpoPair, SdpoItem
from errata_trainer.settings import ChannelSettings

from ..server.local_server import LocalServer
from .played import TOKENIZER, Generator, play, step
from .teachers import pairs as teachers


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalServer("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data")) as server:
        yield server.url


def failing(turn: int) -> str:
    return (step(tool="read", path="green"), step(tool="submit", word="owl"))[turn]


def well(turn: int) -> str:
    return (step(tool="read", path="red"), step(tool="submit", word="elk"))[turn]


def row(url: str, key: str, says: Callable[[int], str]) -> Row:
    played = play(url, Generator(says), {"place": "red", "word": "owl"})
    handed_over = json.loads(json.dumps(played.extra_fields[HANDED_OVER]))
    ids = (list(played.prompt_ids), list(played.response_ids), list(played.response_mask))
    return Row(key, key.split("_")[0], *ids, list(played.response_logprobs), handed_over)


class Server:
    """Stands in for the rollout servers: each token has the log-probability -1, each sampled turn the given calls."""

    def __init__(self, calls: Calls | None = None, *, scores: bool = True) -> None:
        self.unscored, self.unsampled = Counter[str](), Counter[str]()
        self._calls, self._scores = calls, scores
        self.contexts: list[Sequence[int]] = []

    def score(self, items: Sequence[SdpoItem]) -> list[list[float] | None]:
        if not self._scores:
            self.unscored["failed"] += len(items)
        return [[-1.0] * len(item.target_ids) if self._scores else None for item in items]

    def sample(self, contexts: Sequence[Sequence[int]]) -> list[Calls | None]:
        self.contexts.extend(contexts)
        return [self._calls] * len(contexts)


def referred(pairs: Sequence[DpoPair]) -> list[DpoPair]:
    return [replace(pair, ref_chosen=-1.0, ref_rejected=-2.0, reference="policy when asked") for pair in pairs]


def channels(url: str, server: Server | None = None, **options: Any) -> BatchChannels:
    return BatchChannels(
        ChannelOptions(**options),
        played_of(EpisodeOptions(url, "shelf")),
        tokenizer=TOKENIZER,
        end_ids=[TOKENIZER.eos_token_id],
        model_config=None,
        scorer=server or Server(),
        referred=referred,
        reference="policy when asked",
        has_logprobs=True,
        steps=10,
    )


def metrics(made: BatchChannels) -> dict[str, float]:
    return combined([made.metrics.take()], 1)


def test_a_failing_turn_is_a_site_of_its_row_and_padding_has_none(url: str) -> None:
    made = channels(url)
    made.read([row(url, "a_0_0", failing), row(url, "a_1_0", well)], 0)
    first, second = made.of_row("a_0_0"), made.of_row("a_1_0")
    assert made.of_row("pad_0_0").items == () and made.of_row("pad_0_0").rollout.completion_ids == ()
    (item,) = first.items
    assert TOKENIZER.decode(item.target_ids).startswith(failing(0)) and second.items == ()
    assert made.eid == first.rollout.eid
    found = metrics(made)
    assert (found["reward"], found["sdpo/kept"], found["rollouts/errors"]) == (0.5, 1.0, 0.5)
    assert found["frac_reward_zero_std"] == 0.0 and "sdpo/not_scored" not in found


def test_a_weight_of_zero_finds_and_asks_nothing(url: str, tmp_path: Path) -> None:
    source = teachers(url, str(tmp_path / "pairs"))
    made = channels(url, alpha_sdpo=0.0, beta_replay=0.0, pairs=source)
    made.read([row(url, "a_0_0", failing)], 0)
    one = made.of_row("a_0_0")
    assert (one.items, one.pairs, one.turn_scores) == ((), (), None)
    assert source.pool.metrics().get("teachers/states", 0) == 0
    source.close()


def test_the_weight_of_a_step_is_that_of_its_schedule_and_dose(url: str) -> None:
    made = channels(url, alpha_sdpo=linear(0.4, 0.0, 4), settings=ChannelSettings(lower_dose=True))
    assert [made.alpha(step) for step in range(5)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    made.watch.dose = 0.5
    assert made.alpha(0) == pytest.approx(0.2) and made.beta(0) == 0.0, "there is no source of pairs"
    made.read([row(url, "a_0_0", failing)], 4)
    one = made.of_row("a_0_0")
    assert one.items == ()


def test_pairs_stand_in_the_row_whose_action_they_reject(url: str, tmp_path: Path) -> None:
    source = teachers(url, str(tmp_path / "pairs"))
    made = channels(url, pairs=source)
    made.read([row(url, "a_0_0", failing), row(url, "a_1_0", well)], 0)
    first, second = made.of_row("a_0_0"), made.of_row("a_1_0")
    (pair,) = first.pairs
    votes = pair.votes["a"]
    assert first.own == (True,) and second.pairs == () and pair.ref_rejected == -2.0
    assert TOKENIZER.decode(pair.chosen_ids).startswith(step(tool="read", path="red"))
    assert first.turn_scores is None, "prm_weight is 0"
    assert first.teacher_actions == {0: {"a": votes, "b": votes}} and second.teacher_actions == {}
    source.close()


def test_the_estimator_form_has_scores_of_the_server_and_of_the_teachers(url: str, tmp_path: Path) -> None:
    source = teachers(url, str(tmp_path / "pairs"))
    made = channels(url, form="estimator", pairs=source)
    made.read([row(url, "a_0_0", failing)], 0)
    one = made.of_row("a_0_0")
    assert one.turn_scores is not None
    ((score,), (item,)) = one.logprobs, one.items
    assert score == [-1.0] * len(item.target_ids) and one.pairs == ()
    start, stop = one.rollout.turns[0].start, one.rollout.turns[0].stop
    assert one.turn_scores == [-1.0] * (stop - start) + [0.0] * (len(one.rollout.completion_ids) - stop)
    source.close()


def test_the_estimator_form_needs_votes_on_the_batch_itself(url: str, tmp_path: Path) -> None:
    source = teachers(url, str(tmp_path / "pairs"))
    source.waits = False
    with pytest.raises(ValueError, match="wait_s="):
        channels(url, form="estimator", pairs=source)
    source.close()


def test_a_site_that_the_server_does_not_score_is_counted_by_reason(url: str) -> None:
    made = channels(url, Server(scores=False), form="estimator")
    made.read([row(url, "a_0_0", failing)], 0)
    one = made.of_row("a_0_0")
    assert one.logprobs == (None,)
    found = metrics(made)
    assert found["sdpo/not_scored"] == 1.0 and found["sdpo/not_scored/failed"] == 1.0


def test_the_check_plays_the_students_other_turn_in_a_fork(url: str) -> None:
    better: Any = [("step", {"tool": "read", "path": "red"})]
    server = Server(better)
    check = CounterfactualCheck("always")
    made = channels(url, server, check=check)
    made.read([row(url, "a_0_0", failing)], 0)
    (context,) = server.contexts
    assert TOKENIZER.decode(context).endswith("<|im_start|>assistant\n")
    one = made.of_row("a_0_0")
    assert one is not None and len(one.items) == 1
    assert made.acceptance()["counterfactual/accepted"] == 1.0


def test_a_row_that_cannot_be_read_trains_channel_1_and_is_counted(url: str) -> None:
    good = row(url, "a_0_0", failing)
    bad = Row("a_1_0", "a", good.prompt_ids, good.response_ids, good.mask, good.logprobs, "{}")
    other = Row("a_2_0", "a", good.prompt_ids, good.response_ids, good.mask, good.logprobs)
    made = channels(url)
    made.read([good, bad, other], 0)
    kept = [made.of_row(f"a_{n}_0") for n in range(3)]
    assert [len(one.items) for one in kept] == [1, 0, 0]
    assert metrics(made)["rollouts/unread"] == 2.0


def test_lost_rollouts_are_counted_by_reason_and_only_once(url: str) -> None:
    made = channels(url)
    made.count_lost(Counter({"SESSION_LOST": 2}))
    made.count_lost(Counter({"SESSION_LOST": 1, "CALL_DEADLINE": 1}))
    made.count_failed("workers/lost", 1)
    made.count_failed("workers/lost", 0)
    made.count_failed("workers/lost", 1)
    assert made.taken_lost(4) == {
        "workers/lost": 2.0,
        "episodes/lost": 0.5,
        "episodes/lost/CALL_DEADLINE": 1.0,
        "episodes/lost/SESSION_LOST": 3.0,
    }
    assert made.taken_lost(4) == {"episodes/lost": 0.0}


def test_the_table_has_failing_turns_and_the_way_to_their_episodes(url: str) -> None:
    made = channels(url)
    made.read([row(url, "a_0_0", failing)], 0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(made.table({"a_0_0": 0.25}, step=3, most=None, below=["below"]))
    text = console.export_text()
    assert "Step 3" in text and "turn 0 fs.missing" in text and "0.25" in text
    assert f"errata replay {made.eid}  {url.rstrip('/')}/viewer/#{made.eid}/error" in text
