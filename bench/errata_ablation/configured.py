"""The subject of an ablation that a configuration file names: a model, an environment, tasks, a source of pairs."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from errata_protocol.errors import InvalidRequest
from errata_trainer.assembly.pair_source import PairSource
from errata_trainer.episodes.tools import PlayedEnvironment, of_spec
from errata_trainer.recipes.trl import environment_factory

from .serving import served

_KEYS = {
    "policy": {"model", "tokenizer", "dtype", "lora"},
    "environment": {"name", "spec", "url", "target", "options", "variables", "tools", "task_columns", "token_variable"},
    "tasks": {"rows"},
}


class ConfiguredSubject:
    """A `Subject` for `train`, made of the tables of a configuration file.

    Args:
        tables: ``policy``, ``environment``, ``tasks``, and ``pairs`` if there is one.
        url: URL of the environment.

    Raises:
        InvalidRequest: A table has an unknown key, or lacks a required one.
    """

    def __init__(self, tables: Mapping[str, Any], url: str) -> None:
        self._tables, self._url = tables, url
        self._directory = Path(tables["directory"])
        for name, keys in _KEYS.items():
            if unknown := sorted(set(tables[name]) - keys):
                raise InvalidRequest(f"[{name}] has no {', '.join(unknown)}: it has {', '.join(sorted(keys))}")
        if "model" not in tables["policy"] or "rows" not in tables["tasks"]:
            raise InvalidRequest("[policy] needs model, and [tasks] rows: a file of JSON lines")
        self._rows = self._read(self._directory / tables["tasks"]["rows"])

    @staticmethod
    def _read(path: Path) -> list[dict[str, Any]]:
        try:
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"[tasks] rows, {path}: {error}") from error
        if not rows or not all(isinstance(row, dict) and "prompt" in row for row in rows):
            raise InvalidRequest(f"[tasks] rows, {path}: each line is an object with a prompt and the task's columns")
        for row in rows:
            if isinstance(row["prompt"], str):
                row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        return rows

    def _environment(self) -> str | PlayedEnvironment:
        table = self._tables["environment"]
        if "spec" not in table:
            return str(table.get("name", "terminal"))
        return of_spec(_named(table["spec"], "[environment] spec"))

    def trained(self, seed: int) -> dict[str, Any]:
        """Return a new policy, its tasks and its environment; an adapter's weights are drawn with the seed."""
        policy, environment = self._tables["policy"], self._tables["environment"]
        headers = None
        if variable := environment.get("token_variable"):
            if variable not in os.environ:
                raise InvalidRequest(f"[environment] token_variable: {variable} is not set")
            headers = {"Authorization": f"Bearer {os.environ[variable]}"}
        made = {
            "model": AutoModelForCausalLM.from_pretrained(policy["model"], dtype=policy.get("dtype", "auto")),
            "processing_class": AutoTokenizer.from_pretrained(policy.get("tokenizer", policy["model"])),
            "train_dataset": Dataset.from_list(self._rows),
            "environment_factory": environment_factory(
                self._url,
                self._environment(),
                tools=environment.get("tools"),
                task_columns=environment.get("task_columns"),
                headers=headers,
            ),
        }
        if "lora" in policy:
            import torch
            from peft import LoraConfig

            torch.manual_seed(seed)
            made["peft_config"] = LoraConfig(**policy["lora"])
        return made

    def pairs(self, seed: int) -> PairSource:
        """Return the result of the function in ``[pairs] factory``, called with the other keys and ``seed``."""
        table = dict(self._tables.get("pairs") or {})
        if "factory" not in table:
            raise InvalidRequest(
                'an arm with beta_replay needs [pairs] factory = "module:function", which returns a PairSource'
            )
        made: PairSource = _named(table.pop("factory"), "[pairs] factory")(seed=seed, **table)
        return made


def _named(name: str, where: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(f"{where} is {name!r}, not module:attribute that can be imported: {error}") from error


@contextmanager
def configured(tables: Mapping[str, Any], directory: Path) -> Iterator[ConfiguredSubject]:
    """Connect to the environment of a configuration, or serve it on this machine, and yield the subject.

    Raises:
        InvalidRequest: The file has neither ``url`` nor ``target``, or both.
        ServiceError: The server did not start.
    """
    environment = tables["environment"]
    url, target = environment.get("url"), environment.get("target")
    if (url is None) == (target is None):
        raise InvalidRequest("[environment] needs either url, of a server, or target, for `errata serve`")
    if url is not None:
        yield ConfiguredSubject(tables, url)
        return
    with served(
        target,
        directory / "data",
        options=[str(option) for option in environment.get("options", ())],
        environment={name: str(value) for name, value in environment.get("variables", {}).items()},
    ) as made:
        yield ConfiguredSubject(tables, made)
