"""ROLL's own environment manager with episodes of a server; ROLL is on no index, so its source has to be given."""

from __future__ import annotations

import copy
import importlib.util
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from errata_protocol.errors import InvalidRequest, ServiceError
from errata_server.process import ServerProcess
from errata_trainer.tiny import tiny_tokenizer
from tests.environments.shelf import SPEC

if importlib.util.find_spec("roll") is None or importlib.util.find_spec("roll.pipeline") is None:
    pytest.skip("ROLL's source is not here: give its folder in ROLL_SOURCE", allow_module_level=True)

import torch
from dacite import from_dict
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.agentic.env_manager import agent_native_env_manager as native
from roll.pipeline.agentic.llm_proxy import BaseLLMProxy, register_llm_proxy
from roll.pipeline.agentic.utils import agentic_reward_norm, compute_agentic_reinforce_return
from roll.utils.functionals import expand_to_token_level

from errata_trainer.channels.segments import runs_of_mask
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.roll import env as environments
from errata_trainer.recipes.roll.env import ENV_TYPE
from errata_trainer.recipes.roll.manager import LostFilter, TrajectoryEnvManager

LENGTH = 400
TOKENIZER = tiny_tokenizer(
    ["One of red, green, blue holds a word. Submit it. no file green the word is owl right wrong"]
)


def said(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><|im_end|>"


WELL = [said("read", path="red"), said("fly"), said("read", path="green"), said("submit", word="owl")]


class Script:
    """What the student says, turn by turn."""

    turns: list[str] = []  # noqa: RUF012
    with_logprobs = True


@register_llm_proxy("scripted")
class Scripted(BaseLLMProxy):  # type: ignore[misc]
    def generate(self, messages: Any, lm_input: Any, generation_config: Any) -> Any:
        ids = TOKENIZER(Script.turns.pop(0), return_tensors="pt")["input_ids"]
        lm_input.batch["responses"] = ids
        if Script.with_logprobs:
            lm_input.batch["infer_logprobs"] = -torch.arange(1.0, 1 + ids.shape[1])[None] / 10
        return lm_input


class Queue:
    """ROLL's queue of one episode: then the manager stops."""

    def __init__(self) -> None:
        self.put_in: list[Any] = []
        self.manager: Any = None
        self.given = 0
        self.get_episode_id = SimpleNamespace(remote=self._next)
        self.put = SimpleNamespace(remote=self._put)

    def _next(self, *_: Any) -> int | None:
        self.given += 1
        if self.given > 1:
            self.manager.running = False
            return None
        return 0

    def _put(self, group: int, episode: int, step: int, rollout: Any, env: int) -> None:
        if rollout is not None:
            self.put_in.append(rollout)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "served_environment", lambda *_, **__: of_spec(SPEC))
    monkeypatch.setattr(native.ray, "get", lambda value: value)
    monkeypatch.setattr(native.time, "sleep", lambda seconds: None)


def manager(
    server: ServerProcess,
    *,
    mode: str | None = "traj",
    estimator: str = "agentic_reinforce",
    length: int = LENGTH,
    norm: Any = None,
    settings: Any = None,
    **more: Any,
) -> TrajectoryEnvManager:
    template = {
        "env_type": ENV_TYPE,
        "max_steps": 8,
        "max_tokens_per_step": 200,
        "agent_system_template": "",
        "agent_template": "",
        **({} if mode is None else {"formulate_mode": mode}),
    }
    config = {
        "url": server.url,
        "env": "shelf",
        "tasks": [{"place": "green"}],
        "prompt": "Find it. ",
        "max_steps": 8,
    }
    defaults = {"gamma": 0.5, "step_reward_gamma": 0.9, **(settings or {})}
    pipeline = SimpleNamespace(
        **defaults,
        custom_envs=OmegaConf.create({"Shelf": template}),
        sequence_length=length,
        adv_estimator=estimator,
        parse_tool_call_parameter_to_dict=False,
        reward_normalization=norm,
        exp_name="test",
    )
    worker = SimpleNamespace(
        llm_proxy=SimpleNamespace(proxy_type="scripted"),
        generating_args=SimpleNamespace(max_new_tokens=200, to_dict=dict),
        group_filter_cls=more.pop("group_filter_cls", None),
    )
    queue = Queue()
    made = TrajectoryEnvManager(
        worker_config=worker,
        pipeline_config=pipeline,
        env_config=DictConfig(
            {**template, "tag": "Shelf", "group_id": 3, "env_id": 1, "group_seed": 0, "config": {**config, **more}},
        ),
        tokenizer=TOKENIZER,
        generate_scheduler=None,
        output_queue=queue,
        thread_lock=threading.Lock(),
    )
    made.current_step = 0
    queue.manager = made
    return made


def played(made: TrajectoryEnvManager, turns: list[str], *, logprobs: bool = True) -> Any:
    Script.turns, Script.with_logprobs = list(turns), logprobs
    made.run_rollout_loop(DataProto(meta_info={"seed": 0}))
    made.env.close()
    [batch] = made.output_queue.put_in
    return batch


def test_a_trajectory_is_one_sample_and_equals_the_steps(server: ServerProcess) -> None:
    packed, steps = played(manager(server), WELL), played(manager(server, mode="step"), WELL)
    assert (len(packed), len(steps)) == (1, 4)
    assert set(steps.batch.keys()) == set(packed.batch.keys()) - {"segment_ids", "step_rewards"}
    assert set(steps.non_tensor_batch.keys()) == set(packed.non_tensor_batch.keys())
    one = {name: column[0] for name, column in packed.batch.items()}
    names = list(steps.batch.keys())
    assert {name: column.dtype for name, column in steps.batch.items()} == {name: one[name].dtype for name in names}
    assert {name: column.shape[1] for name, column in steps.batch.items()} == {name: len(one[name]) for name in names}
    runs = runs_of_mask(one["response_mask"][None])[0]
    assert torch.equal(runs, one["segment_ids"]) and int(runs.max()) == 3
    for turn in range(4):  # the same context, tokens and log-probabilities of each turn
        step = {name: column[turn] for name, column in steps.batch.items()}
        places, own = (runs == turn).nonzero()[:, 0], step["response_mask"].nonzero()[:, 0]
        assert torch.equal(one["input_ids"][: places[-1] + 1], step["input_ids"][: own[-1] + 1])
        assert len(places) == len(own)
        torch.testing.assert_close(one["infer_logprobs"][places - 1], step["infer_logprobs"][own - 1])
    size = int(one["attention_mask"].sum())
    assert one["position_ids"][:size].tolist() == list(range(size)) and not one["position_ids"][size:].any()
    assert torch.equal(one["prompt_mask"], torch.arange(LENGTH) < (runs == 0).nonzero()[0])
    assert one["scores"].tolist() == [0.0] * (size - 1) + [1.0] + [0.0] * (LENGTH - size)
    assert packed.non_tensor_batch["episode_scores"].tolist() == [1.0]
    assert packed.non_tensor_batch["step_scores"][0] == [0.0, 0.0, 0.0, 1.0]
    data = json.loads(packed.non_tensor_batch["trajectory_data"][0])
    assert data["env_info"]["eid"] and data["env_info"]["task"] == {"place": "green"}
    metrics = packed.meta_info["metrics"]
    assert {
        name: metrics[f"env/Shelf/{name}"] for name in ("samples", "turns_left_out", "calls", "errors", "lost")
    } == {"samples": 1.0, "turns_left_out": 0.0, "calls": 4.0, "errors": 2.0, "lost": 0.0}


def returns_of(batch: Any, gamma: float) -> Any:
    """Return what ROLL's estimator makes of a batch."""
    batch.batch["response_level_rewards"] = batch.batch["scores"].sum(-1)
    rewards = expand_to_token_level(batch)
    return compute_agentic_reinforce_return(rewards, gamma, 1.0, mask=batch.batch["response_mask"][:, 1:])[1]


def test_rolls_own_estimator_gives_the_same_returns_in_any_packing(server: ServerProcess) -> None:
    """A turn in other tokens than those of its text: the prefix breaks behind it, and two samples are made."""
    whole = played(manager(server), WELL)
    found = returns_of(whole, 0.5)
    segments = whole.batch["segment_ids"][:, 1:]
    assert [float(found[0][segments[0] == turn][0]) for turn in range(4)] == [0.125, 0.25, 0.5, 1.0]
    expected = [0.9**3, 0.9**2, 0.9, 1.0]
    assert [float(whole.batch["step_rewards"][0][whole.batch["segment_ids"][0] == turn][0]) for turn in range(4)] == (
        pytest.approx(expected)
    )
    made = manager(server)
    generate = made.llm_proxy.generate

    def in_pieces(messages: Any, lm_input: Any, generation_config: Any) -> Any:
        turn = len(Script.turns)
        made_of = generate(messages, lm_input, generation_config)
        if turn == 3:
            text = TOKENIZER.decode(made_of.batch["responses"][0])
            ids = [token for letter in text[:12] for token in TOKENIZER.encode(letter)] + TOKENIZER.encode(text[12:])
            made_of.batch["responses"] = torch.tensor([ids])
            made_of.batch["infer_logprobs"] = torch.zeros(1, len(ids))
        return made_of

    made.llm_proxy.generate = in_pieces
    broken = played(made, WELL)
    assert len(broken) == 2
    found, segments = returns_of(broken, 0.5), broken.batch["segment_ids"][:, 1:]
    by_turn = {turn: set(found[segments == turn].tolist()) for turn in range(4)}
    assert by_turn == {0: {0.125}, 1: {0.25}, 2: {0.5}, 3: {1.0}}
    assert list(broken.non_tensor_batch["step_scores"]) == [[0.0, 0.0], [0.0, 1.0]]
    assert [one is None for one in broken.non_tensor_batch["trajectory_data"]] == [True, False]
    both = DataProto.concat([whole, broken])
    assert len(both) == 3


def test_without_log_probabilities_there_is_no_column(server: ServerProcess) -> None:
    assert "infer_logprobs" not in set(played(manager(server), WELL, logprobs=False).batch.keys())


@pytest.mark.parametrize("mode", ["traj", "step"])
def test_a_context_that_is_full_ends_the_episode_and_its_reward_is_the_last_turns(
    server: ServerProcess, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROLL's own step samples lose the reward of an entry without a turn."""
    made = manager(server, length=150, mode=mode)
    monkeypatch.setattr(made.env._runner, "finish", lambda: 1.0)
    batch = played(made, WELL)
    assert int(batch.batch["response_mask"].sum()) > 0 and batch.non_tensor_batch["episode_scores"][0] == 1.0
    assert float(batch.batch["scores"].sum()) == 1.0
    data = json.loads(batch.non_tensor_batch["trajectory_data"][-1])
    assert data["failure_info"]["stop_reason"] == "MAX_LENGTH" and data["failure_info"]["failure_mode"] == ""


def test_a_name_that_is_no_text_ends_no_run(server: ServerProcess) -> None:
    odd = r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call><|im_end|>'
    assert len(played(manager(server), [odd, *WELL[2:]])) == 1


def hide_reasoning(made: TrajectoryEnvManager) -> None:
    """Give a manager a template whose generation prompt has a block that earlier turns have not, as Qwen3's."""
    made.tokenizer = copy.deepcopy(TOKENIZER)
    opening, marked = "assistant\n' }}{% endif", "assistant\n<think></think>' }}{% endif"
    made.tokenizer.chat_template = TOKENIZER.chat_template.replace(opening, marked)
    assert marked in made.tokenizer.chat_template


def test_a_template_that_hides_what_was_sampled_is_said(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    made = manager(server)
    hide_reasoning(made)
    batch = played(made, WELL)
    assert len(batch) == 4 and "no two of an episode's 4 turns share a sample" in caplog.text
    assert [batch.non_tensor_batch["step_scores"][row] for row in range(4)] == [[0.0], [0.0], [0.0], [1.0]]
    assert batch.batch["scores"].sum(-1).tolist() == [0.125, 0.25, 0.5, 1.0]


def test_rows_of_a_good_trajectory_stay_above_a_groups_mean(server: ServerProcess) -> None:
    """ROLL subtracts the mean before it discounts."""
    norm = SimpleNamespace(grouping="traj_group_id", norm_mean_type="group", norm_std_type=None)
    made = manager(server, norm=norm)
    hide_reasoning(made)
    assert played(made, WELL).batch["scores"].sum(-1).tolist() == [1.0] * 4


def test_an_episode_without_a_turn_keeps_its_reward_and_trains_nothing(server: ServerProcess) -> None:
    made = played(manager(server, length=20), WELL)
    assert not made.batch["response_mask"].any() and not made.meta_info["drop_flag"]
    assert made.batch["scores"].sum() == made.non_tensor_batch["episode_scores"][0] == 0.0
    assert made.non_tensor_batch["traj_group_id"][0] == "Shelf_3_0_0"


@pytest.mark.parametrize("mode", ["traj", "step"])
def test_a_lost_episode_trains_nothing_and_stands_alone(server: ServerProcess, mode: str) -> None:
    lost = played(manager(server, mode=mode), [said("read", path="red"), said("read", path="broken")])
    well = played(manager(server, mode=mode), WELL)
    assert lost.meta_info["drop_flag"] and "the shelf fell" in lost.meta_info["lost"]
    assert not lost.batch["response_mask"].any() and not lost.batch["attention_mask"].any()
    assert lost.meta_info["metrics"] == {"env/Shelf/lost": 1.0}
    assert set(lost.batch.keys()) == set(well.batch.keys())
    both = DataProto.concat([well, lost, well])
    scores = DataProto.from_dict({"scores": both.batch["scores"].sum(-1)})
    scores.non_tensor_batch = both.non_tensor_batch
    normed = agentic_reward_norm(
        scores, SimpleNamespace(grouping="traj_group_id", norm_mean_type="group", norm_std_type=None)
    )
    mean = 1.0 / (1 if mode == "traj" else 4)
    assert normed[0] == pytest.approx(float(both.batch["scores"][0].sum()) - mean)  # of the others alone


def test_an_episode_that_never_begins_is_dropped(tmp_path: Path) -> None:
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path) as server:
        made = manager(server, message_timeout_s=0.5, retries=0)
        server.kill()
        batch = played(made, WELL)
    assert batch.meta_info["drop_flag"] and batch.meta_info["lost"].startswith("lost: ")
    assert batch.non_tensor_batch["traj_group_id"][0] == "Shelf_3_0_0_lost_1"


def test_groups_with_lost_episodes_are_dropped_until_too_many_are() -> None:
    made = LostFilter(None, SimpleNamespace(num_env_groups=2), "train")
    well, lost = SimpleNamespace(meta_info={}), SimpleNamespace(meta_info={"drop_flag": True, "lost": "gone"})
    assert not made.filter(0, 0, [well, None])
    for _ in range(15):
        assert made.filter(0, 0, [well, lost])
    assert not made.filter(0, 0, [well, well])
    for _ in range(15):
        assert made.filter(0, 0, [lost, lost])
    with pytest.raises(ServiceError, match="16 groups in a row have a lost episode, at last: gone"):
        made.filter(0, 0, [lost, well])


def test_columns_are_the_same_where_the_generator_gives_no_log_probabilities(server: ServerProcess) -> None:
    made = manager(server)
    whole = played(made, WELL, logprobs=False)
    made.failure_mode = "lost"
    assert len(DataProto.concat([whole, made.create_placeholder_rollout(0)])) == 2


def test_wrong_settings_are_refused(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidRequest, match="formulate_mode is 'episode'"):
        manager(server, mode="episode")
    with pytest.raises(InvalidRequest, match="set adv_estimator: agentic_reinforce"):
        manager(server, mode=None, estimator="step_reinforce")
    manager(server, mode="step", estimator="step_reinforce").env.close()
    for name in ("gamma", "step_reward_gamma"):
        with pytest.raises(InvalidRequest, match=f"^{name} is 1.5"):
            manager(server, settings={name: 1.5})
    theirs = {"group_filter_cls": "roll.pipeline.agentic.agentic_pipeline.GroupFilter"}
    warning = "lets lost episodes through: set errata_trainer.recipes.roll.manager.LostFilter"
    for grouping, mean, std in (("batch", "group", None), ("traj_group_id", "batch", None), ("tags", None, "group")):
        norm = SimpleNamespace(grouping=grouping, norm_mean_type=mean, norm_std_type=std)
        with pytest.raises(InvalidRequest, match=warning):
            manager(server, norm=norm, **theirs)
        manager(server, norm=norm, group_filter_cls="errata_trainer.recipes.roll.manager.LostFilter").env.close()
    assert warning not in caplog.text
    for norm in (None, SimpleNamespace(grouping="traj_group_id", norm_mean_type="group", norm_std_type="group")):
        manager(server, norm=norm, **theirs).env.close()
    assert caplog.text.count(warning) == 2


def test_roll_reads_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # ROLL makes its folders
    monkeypatch.setenv("ERRATA_URL", "http://host:8000")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with initialize_config_dir(str(Path(__file__).parents[2] / "examples" / "roll"), version_base=None):
        found = OmegaConf.to_container(compose("terminal"), resolve=True)
    config = from_dict(data_class=AgenticConfig, data=found)
    assert config.train_env_manager.group_filter_cls.endswith(".LostFilter")
    [env_config, *_] = config.train_env_manager.env_configs[0].values()
    assert env_config["env_manager_cls"].endswith(".TrajectoryEnvManager")
    assert OmegaConf.to_container(env_config["config"]) == {
        "url": "http://host:8000/terminal",
        "env": "terminal",
        "max_steps": 16,
    }
    assert (config.adv_estimator, config.ratio_type, config.gamma) == ("agentic_reinforce", "segment", 0.95)
