"""The `ema` and `initial` teachers: their weights, their device, and what TRL sees of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from peft import LoraConfig, get_peft_model

from errata_trainer.assembly.teacher_weights import TeacherAdapter, TeacherCopy, has_adapter
from errata_trainer.recipes.trl.refusals import refuse_second_adapter
from errata_trainer.tiny import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


def student(dtype: torch.dtype, *, lora: bool) -> Any:
    model = tiny_model(tiny_tokenizer(["a b c"])).to(dtype)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    return get_peft_model(model, config, autocast_adapter_dtype=False) if lora else model


def trained(model: Any) -> list[torch.Tensor]:
    return [weight for weight in model.parameters() if weight.requires_grad]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slow_average_arrives_in_half_precision_too(dtype: torch.dtype, lora: bool) -> None:
    model = student(dtype, lora=lora)
    teacher = (TeacherAdapter if lora else TeacherCopy)(model, 0.01)
    teacher.begin(model, CPU)
    with torch.no_grad():
        for weight in trained(model):
            weight.add_(torch.full_like(weight, 0.05))
    for _ in range(500):  # 0.99**500 of the way is left: 0.0003
        teacher.update(model)
    if lora:
        pairs = list(zip(teacher.shadow_weights.values(), teacher._own().values(), strict=True))
    else:
        pairs = list(zip(teacher.model.parameters(), model.parameters(), strict=True))
    for average, own in pairs:
        torch.testing.assert_close(average.float(), own.float(), atol=2e-3, rtol=1e-2)


def test_the_average_of_half_precision_weights_goes_on_from_its_checkpoint(tmp_path: Any) -> None:
    model = student(torch.bfloat16, lora=False)
    teachers = [TeacherCopy(model, 0.01) for _ in range(2)]
    teachers[0].begin(model, CPU)
    with torch.no_grad():
        for weight in trained(model):
            weight.add_(torch.full_like(weight, 0.05))
    teachers[0].update(model)
    teachers[0].save(tmp_path)
    teachers[1].begin(model, CPU, tmp_path)
    assert teachers[0]._wide.keys() == teachers[1]._wide.keys() != set()
    for name, weight in teachers[0]._wide.items():
        assert torch.equal(weight, teachers[1]._wide[name]), name


def test_a_copy_follows_a_student_that_was_moved_since(monkeypatch: pytest.MonkeyPatch) -> None:
    model = student(torch.float32, lora=False)
    teacher = TeacherCopy(model, 0.5)
    moved: list[Any] = []
    monkeypatch.setattr(teacher.model, "to", moved.append)
    teacher.begin(model, torch.device("meta"))
    assert moved == [torch.device("meta")]


def test_an_adapters_average_asks_nobody_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any, **__: Any) -> bool:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", asked)
    model = student(torch.float32, lora=True)
    model.get_base_model().config._name_or_path = "some/model"
    model.peft_config["default"].base_model_name_or_path = "some/model"
    teacher = TeacherAdapter(model, 0.5)
    teacher.begin(model, CPU)
    teacher.update(model)


def test_copies_of_modules_that_trl_would_send_to_vllm_are_refused() -> None:
    model = tiny_model(tiny_tokenizer(["a"]))
    model.config.tie_word_embeddings = False
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match="modules_to_save"):
        refuse_second_adapter(model, True)
    refuse_second_adapter(model, False)
    refuse_second_adapter(student(torch.float32, lora=True), True)
    refuse_second_adapter(student(torch.float32, lora=False), True)
    assert has_adapter(model)
