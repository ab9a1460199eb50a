"""The recipe's configuration: what it offers, what it makes of it, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from errata_trainer.channels.schedules import Schedule
from errata_trainer.recipes.verl import main
from errata_trainer.recipes.verl.options import ChannelOptions, EpisodeOptions, channel_options_of, options_of
from errata_trainer.recipes.verl.refusals import check_configuration
from errata_trainer.settings import ChannelSettings

EXAMPLES = Path(__file__).parents[2] / "examples/verl"
AGENT = "actor_rollout_ref.rollout.agent"
URL = "errata.url=http://host:8000"


def config(*overrides: str) -> Any:
    with initialize_config_dir(str(Path(main.__file__).parent / "config"), version_base=None):
        return compose("errata_ppo", [URL, "actor_rollout_ref.model.path=/none", *overrides])


def test_each_option_stands_in_the_file_with_its_default() -> None:
    block = OmegaConf.to_container(config().errata)
    channels = block.pop("channels")
    assert block == {**dataclasses.asdict(EpisodeOptions("http://host:8000"))}
    assert channels.pop("settings") == dataclasses.asdict(ChannelSettings())
    mine = {one.name: getattr(ChannelOptions(), one.name) for one in dataclasses.fields(ChannelOptions)}
    for elsewhere in ("settings", "alpha_sdpo", "beta_replay"):
        mine.pop(elsewhere)
    assert channels == mine
    assert channel_options_of(config()) == ChannelOptions()


def test_verls_own_settings_are_those_of_the_recipe() -> None:
    made = config()
    assert made.algorithm.adv_estimator == "grpo_composer"
    assert made.actor_rollout_ref.rollout.agent.default_agent_loop == "errata"
    check_configuration(made, channel_options_of(made))


def test_objects_are_made_of_their_descriptions() -> None:
    overrides = [
        "algorithm.alpha_sdpo={_target_:errata_trainer.channels.schedules.linear,start:0.2,end:0.0,steps:10}",
        "errata.channels.settings.hint_keys=[fs.*]",
        "errata.channels.check={_target_:errata_trainer.assembly.counterfactual.CounterfactualCheck,mode:sample}",
    ]
    options = channel_options_of(config(*overrides))
    assert options.alpha_sdpo == Schedule(0.2, 0.0, 10, "linear")
    assert options.settings.hint_keys == ("fs.*",)
    assert options.check is not None and options.check.mode == "sample"
    described: Any = channel_options_of(config(*overrides), made=False).check
    assert described["mode"] == "sample"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("errata.channels.form=both", "errata.channels.form is 'both'"),
        ("+errata.channels.alpha_sdpo=1", "stands in algorithm.alpha_sdpo"),
        ("+errata.channels.teacher=ema", "no option errata.channels.teacher"),
        ("+errata.channels.settings.teachers=ema", "no option errata.channels.settings.teachers"),
        ("errata.channels.settings.teacher=none", "teacher is 'none'"),
        ("+errata.turn=1", "no option errata.turn: there are .*, channels"),
        ("errata.url=null", "needs the URL"),
    ],
)
def test_an_option_that_is_not_known_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made = config(override)
        options_of(made)
        channel_options_of(made)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator is 'grpo'"),
        (["actor_rollout_ref.rollout.n=1"], "rollout.n is 1"),
        (
            [f"+{AGENT}.agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ"],
            "AgentLoopManagerTQ, which does not see lost rollouts",
        ),
        (["errata.channels.form=estimator", "actor_rollout_ref.rollout.temperature=0.7"], "temperature is 0.7"),
        (["errata.channels.form=estimator", "errata.channels.settings.prm_weight=1"], "prm_weight is for form=loss"),
    ],
)
def test_what_verl_cannot_do_with_the_channels_is_said_at_the_start(overrides: list[str], message: str) -> None:
    made = config(*overrides)
    with pytest.raises(ValueError, match=message):
        check_configuration(made, channel_options_of(made))


@pytest.mark.parametrize("name", ["grpo_composer", "cpu"])
def test_the_examples_are_valid(name: str) -> None:
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        path = f"hydra.searchpath=[pkg://verl.trainer.config,file://{Path(main.__file__).parent}/config]"
        made = compose(name, [path, URL, "actor_rollout_ref.model.path=/none", "trainer.device=cpu"])
    options_of(made)
    check_configuration(made, channel_options_of(made))
    validate_config(made, use_reference_policy=need_reference_policy(made), use_critic=need_critic(made))


def test_a_run_on_several_boxes_joins_their_cluster(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "DIRECTORY": str(tmp_path / "run")}
    environment |= {"ERRATA_URL": "http://first:8000", "NODES": "4", "MODEL": "mine"}
    script = [str(EXAMPLES / "run_ray.sh"), "trainer.total_epochs=1"]
    asked = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    for one in ("+ray_kwargs.ray_init.address=auto", "trainer.nnodes=4", "errata.url=http://first:8000"):
        assert one in asked
    assert "actor_rollout_ref.model.path=mine" in asked and asked[-1] == "trainer.total_epochs=1"
    assert f"{tmp_path}/run/train.parquet" in asked and "http://first:8000" in asked, "the data are written first"
    without = subprocess.run(script, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert without.returncode != 0 and "ERRATA_URL: is not set" in without.stderr
