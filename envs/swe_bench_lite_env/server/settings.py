"""Settings of this environment, from ``ERRATA_SWE_*`` environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from errata_protocol.errors import EnvironmentFailed


class SweSettings(BaseSettings):
    """Settings of the environment, read at every reset. ``none`` stands for None.

    Attributes:
        dataset: Instances to offer besides the bundled ones: a file or directory, or a name on the Hugging Face hub.
        recipes: File with the recipes of ``dataset``; needed with it, unless ``images`` is set.
        images: ``NAMESPACE[:TAG]`` of the images that the instances of ``dataset`` were prepared on (``errata swe
            prepare --images``). A recipe then only says what differs.
        split: The split of ``dataset`` to offer; all but ``test`` without it. ``test`` has to be named.
        rules: Version of the benchmark's rules that grade: 5 for swebench 5.0.2, 4 for 4.1.0.
        reward: Kind of reward. ``resolved``: 1.0 or 0.0. ``fraction``: the share of FAIL_TO_PASS that passes where all
            of PASS_TO_PASS does, else 0.0.
        discount: Factor in [0, 1]: each step of a graded episode gets ``reward * discount ** (steps to the end)``, as
            late rewards of the environment; None credits none.
        max_turns: Most calls of one episode, ``submit`` included; None for no bound.
        max_seconds: Limit of the wall time of an episode's calls together, in seconds; None for no bound. The time
            between calls does not count.
        max_output_bytes: Limit of outputs and files in an episode's observations, UTF-8 bytes; None for no bound.
        command_timeout_s: Time limit of ``run`` where the agent names none, seconds.
        max_command_timeout_s: Longest time limit that an agent may name, seconds.
        grading_timeout_s: Time limit of one run of the tests, seconds.
        profile: Programs that the agent's commands do not have: ``default``: readers of byte code; ``strict``: ``find``
            and ``unzip``, too; ``off``: none is taken away.
        grading_slots: Most submissions that are graded at a time; others wait, first come first served. 0 allows one
            for each CPU.
    """

    model_config = SettingsConfigDict(env_prefix="ERRATA_SWE_", extra="ignore", frozen=True, env_parse_none_str="none")

    dataset: str | None = None
    recipes: Path | None = None
    images: str | None = None
    split: str | None = None
    rules: Literal[4, 5] = 5
    reward: Literal["resolved", "fraction"] = "resolved"
    discount: float | None = Field(default=None, ge=0, le=1)
    max_turns: int | None = Field(default=200, gt=0)
    max_seconds: float | None = Field(default=3600.0, gt=0)
    max_output_bytes: int | None = Field(default=8 * 1024**2, gt=0)
    command_timeout_s: float = Field(default=60.0, gt=0)
    max_command_timeout_s: float = Field(default=600.0, gt=0)
    grading_timeout_s: float = Field(default=600.0, gt=0)
    profile: Literal["off", "default", "strict"] = "default"
    grading_slots: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _a_data_set_needs_recipes(self) -> SweSettings:
        if self.dataset and not (self.recipes or self.images):
            raise ValueError(
                "ERRATA_SWE_DATASET needs ERRATA_SWE_RECIPES, the file of its recipes, or ERRATA_SWE_IMAGES"
            )
        if (self.recipes or self.images or self.split) and not self.dataset:
            raise ValueError(
                "ERRATA_SWE_RECIPES, ERRATA_SWE_IMAGES and ERRATA_SWE_SPLIT need ERRATA_SWE_DATASET, the data set they "
                "are of"
            )
        return self


def read_settings() -> SweSettings:
    """Read the settings from environment variables.

    Raises:
        EnvironmentFailed: A variable has an invalid value.
    """
    try:
        return SweSettings()
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            name = "".join(f"ERRATA_SWE_{str(part).upper()}: " for part in problem["loc"])
            problems.append(f"{name}{problem['msg']}")
        raise EnvironmentFailed(f"settings of swe_bench_lite: {'; '.join(problems)}") from error
