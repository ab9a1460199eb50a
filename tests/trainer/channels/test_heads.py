"""What is found inside of a model makes the model's own logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from toy_models import KINDS, toy

from errata_trainer.channels.distil import project
from errata_trainer.channels.heads import ScaledSoftcap, backbone, logit_transform, output_head, unwrapped

IDS = torch.tensor([[5, 9, 2, 7, 7, 3, 8]])


def logits_by_hand(model: Any) -> Tensor:
    """Hidden states of the backbone, and logits as `output_head` says."""
    head = output_head(model)
    hidden = backbone(model)(input_ids=IDS)[0][0]
    logits = project(hidden, head.weight, head.bias)
    return logits if head.transform is None else head.transform(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_makes_the_models_logits(kind: str) -> None:
    model = toy(kind)
    torch.testing.assert_close(logits_by_hand(model), model(input_ids=IDS).logits[0])


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]])
def test_adapters_on_the_head_are_merged_as_they_are_now_and_get_their_gradient(targets: list[str]) -> None:
    model = get_peft_model(toy("qwen3"), LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    own = model(input_ids=IDS).logits[0]
    by_hand = logits_by_hand(model)
    torch.testing.assert_close(by_hand, own, rtol=1e-6, atol=1e-6)
    factors = [p for n, p in model.named_parameters() if "lora" in n and ("lm_head" in n) == ("lm_head" in targets)]
    actual = torch.autograd.grad(by_hand.square().sum(), factors)
    torch.testing.assert_close(actual, torch.autograd.grad(own.square().sum(), factors), rtol=1e-6, atol=1e-6)
    with model.disable_adapter():
        torch.testing.assert_close(logits_by_hand(model), model(input_ids=IDS).logits[0])
    torch.testing.assert_close(logits_by_hand(model), own, rtol=1e-6, atol=1e-6)
    model.merge_adapter()
    torch.testing.assert_close(logits_by_hand(model), own, rtol=1e-6, atol=1e-6)
    if "lm_head" in targets:
        with model.disable_adapter(), pytest.raises(ValueError, match="unmerge them first"):
            output_head(model)


def test_a_head_that_is_trained_whole_beside_adapters_is_the_trained_one() -> None:
    model = get_peft_model(toy("qwen3"), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    head = unwrapped(model).get_output_embeddings()
    with torch.no_grad():
        head.modules_to_save["default"].weight.mul_(2.0)
    assert output_head(model).weight is head.modules_to_save["default"].weight
    with model.disable_adapter():
        assert output_head(model).weight is head.original_module.weight


def test_a_head_whose_weight_is_no_sum_is_refused() -> None:
    config = LoraConfig(r=2, target_modules=["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match="variant of LoRA"):
        output_head(get_peft_model(toy("qwen3"), config))
    config = LoraConfig(r=2, target_modules=["lm_head"], lora_bias=True, bias="none")
    with pytest.raises(ValueError, match="bias of its own"):
        output_head(get_peft_model(toy("qwen3", tie_word_embeddings=False), config))


def test_an_adapter_of_another_kind_and_a_quantised_head_are_refused() -> None:
    with pytest.raises(ValueError, match="no LoRA"):
        output_head(get_peft_model(toy("qwen3"), LoHaConfig(r=2, target_modules=["lm_head"])))
    model = toy("qwen3")
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="quantised"):
        output_head(model)


def test_a_head_that_is_not_there_or_elsewhere_is_refused() -> None:
    model = toy("qwen3")
    model.lm_head.weight = nn.Parameter(torch.zeros(0, dtype=torch.float64))
    with pytest.raises(ValueError, match="gather it first"):
        output_head(model)
    model.set_output_embeddings(None)
    with pytest.raises(ValueError, match="no output embedding"):
        output_head(model)
    with pytest.raises(ValueError, match="no base_model"):
        backbone(nn.Linear(2, 2))


def test_wrappers_are_taken_off() -> None:
    model = toy("qwen3")
    assert unwrapped(SimpleNamespace(module=get_peft_model(model, LoraConfig(target_modules=["q_proj"])))) is model
    assert unwrapped(SimpleNamespace(_orig_mod=model)) is model


def test_scales_that_are_no_numbers_are_refused_and_none_are_no_transform() -> None:
    assert logit_transform(SimpleNamespace()) is None
    assert logit_transform(SimpleNamespace(logit_scale=1.0)) is None
    assert logit_transform(SimpleNamespace(model_type="hyperclovax", logits_scaling=4.0)) == ScaledSoftcap(4.0)
    assert logit_transform(SimpleNamespace(lm_head_multiplier=2, final_logit_softcapping=30.0)) == ScaledSoftcap(
        2.0, 30.0
    )
    with pytest.raises(ValueError, match="inv_sqrt"):
        logit_transform(SimpleNamespace(logit_scale="inv_sqrt_d_model"))
