"""Named settings of the trainer, each with the experiment that chose it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .settings import ChannelSettings


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings that did better than the defaults in an experiment.

    Attributes:
        evidence: The experiment's page in the repository.
        arm: The arm of the experiment's plan that has these settings.
        requires: Condition that a policy has to meet for the evidence to apply to it.
        alpha_sdpo: Weight of channel 2.
        settings: Options of the channels.
    """

    evidence: str
    arm: str
    requires: str
    alpha_sdpo: float
    settings: ChannelSettings = field(default_factory=ChannelSettings)

    def arguments(self) -> dict[str, Any]:
        """Return the preset as keyword arguments of `ThreeChannelGRPOTrainer`."""
        return {"alpha_sdpo": self.alpha_sdpo, "settings": self.settings}


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "followed-hints": Preset(
            evidence="docs/experiments/projects.md",
            arm="sdpo-1-keys",
            requires="the policy does what the hints say: with the hint before the failing turn, most turns are right",
            alpha_sdpo=1.0,
            settings=ChannelSettings(hint_keys=("!tool.malformed",)),
        )
    }
)
"""By name. They are no defaults: the policies of the experiment had 10^5 parameters."""


def preset(name: str) -> dict[str, Any]:
    """Return the keyword arguments of `ThreeChannelGRPOTrainer` that a preset sets.

    Raises:
        ValueError: There is no preset of that name; the message lists them.
    """
    found = PRESETS.get(name)
    if found is None:
        raise ValueError(f"there is no preset {name!r}; there are: {', '.join(sorted(PRESETS))}")
    return found.arguments()
