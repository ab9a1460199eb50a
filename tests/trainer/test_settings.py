"""`ChannelSettings` refuses values that no channel would report."""

from __future__ import annotations

import pytest

from errata_trainer.settings import ChannelSettings


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sdpo_targets", "call", "sdpo_targets is 'call': use 'turn' or 'calls'"),
        ("teacher", "emma", "teacher is 'emma': use 'live' or 'ema' or 'base' or 'initial'"),
        ("dpo_reference", "inital", "dpo_reference is 'inital'"),
        ("dpo_loss", "hinge", "dpo_loss is 'hinge'"),
        ("sdpo_form", "sample", "sdpo_form is 'sample'"),
        ("clip_mode", "tokens", "clip_mode is 'tokens'"),
        ("support", "both", "support is 'both'"),
        ("ema_rate", 0.0, r"ema_rate is 0.0: .* in \(0, 1\]"),
        ("ema_rate", 1.5, "ema_rate is 1.5"),
        ("ema_rate", float("nan"), "ema_rate is nan"),
        ("max_sites", -1, "max_sites is -1: at least 0"),
        ("pairs_per_batch", -1, "pairs_per_batch is -1"),
        ("prm_weight", -0.5, "prm_weight"),
    ],
)
def test_a_value_that_is_no_choice_is_refused(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChannelSettings(**{option: value})  # type: ignore[arg-type]


def test_the_ends_of_ranges_are_values() -> None:
    ChannelSettings(ema_rate=1.0, max_sites=0, pairs_per_batch=0, prm_weight=0.0)
