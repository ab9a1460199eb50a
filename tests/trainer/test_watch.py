"""Signs that channel 2 does harm."""

from __future__ import annotations

import logging

import pytest

from errata_trainer.monitoring.watch import SIGNS, Watch

HARM = {"rollouts/calls": (2.0, 0.4), "sdpo/divergence": (0.1, 0.5), "counterfactual/accepted": (0.8, 0.2)}


@pytest.mark.parametrize("metric", list(HARM))
def test_each_sign_is_logged_once_with_the_setting_to_change(metric: str, caplog: pytest.LogCaptureFixture) -> None:
    before, after = HARM[metric]
    watch = Watch(4)
    with caplog.at_level(logging.WARNING, "errata.trainer"):
        for value in [before] * 8 + [after]:
            watch.see({metric: value})
        assert not caplog.records, "a mean over a window, not a single step"
        for _ in range(12):
            watch.see({metric: after})
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{metric} went from {before:.3g} to ")
    assert any(name in record.getMessage() for name in ("alpha_sdpo", "ema_rate"))
    assert watch.shown == [metric] and watch.dose == 1.0, "the dose is the user's"


def test_the_dose_is_halved_once_for_each_window() -> None:
    watch = Watch(4, lower_dose=True)
    for value in [2.0] * 4 + [0.1] * 4:
        watch.see({"rollouts/calls": value})
    assert watch.dose == 0.5
    for _ in range(3):
        watch.see({"rollouts/calls": 0.1})
    assert watch.dose == 0.5, "the lower dose has a window to show"
    watch.see({"rollouts/calls": 0.1})
    assert watch.dose == 0.25


def test_what_improves_is_no_sign() -> None:
    watch = Watch(2, lower_dose=True)
    for step in range(40):
        watch.see({"rollouts/calls": 1.0 + step, "sdpo/divergence": 1.0 / (1 + step), "counterfactual/accepted": 0.9})
    watch.see({})
    assert watch.shown == [] and watch.dose == 1.0
    assert {sign.metric for sign in SIGNS} == set(HARM)
