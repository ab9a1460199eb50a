"""The benchmark's files: predictions in, the report of an instance and of a run out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errata_protocol.errors import InvalidRequest

from ..dataset import Dataset
from ..input_files import FileRefused, json_values
from .log_parsers import RULES
from .verdict import Resolution, classify

SCHEMA_VERSION = 2


class PredictionsInvalid(InvalidRequest):
    """A file of predictions that cannot be used; the message names the entry and what it needs."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model proposes for an instance.

    Args:
        instance_id: The instance.
        model_patch: Unified diff; empty or None: the model proposes nothing, and the instance is not run.
        model_name_or_path: Name of the model.
    """

    instance_id: str
    model_patch: str | None = field(repr=False)
    model_name_or_path: str = "None"

    def row(self) -> dict[str, str | None]:
        """Return the prediction as its file has it."""
        return {name: getattr(self, name) for name in ("instance_id", "model_name_or_path", "model_patch")}


@dataclass(frozen=True, slots=True)
class Graded:
    """What became of one prediction that was run.

    Args:
        resolution: The verdict; None where the benchmark writes no report: the patch does not apply, or the tests were
            killed at their time limit.
        log: Log of the run, which is searched for signatures of a broken environment (rules 5).
    """

    resolution: Resolution | None
    log: str = field(default="", repr=False)


def load_predictions(path: str | Path) -> list[Prediction]:
    """Read predictions: JSON lines, a JSON list, or a JSON object by instance id.

    Raises:
        PredictionsInvalid: The file cannot be read, an entry lacks something, or two are for one instance.
    """
    path = Path(path).expanduser()
    try:
        entries: Any = json_values(path)
    except FileRefused as error:
        raise PredictionsInvalid(error.message) from error
    except OSError as error:
        raise PredictionsInvalid(f"{path}: {error.strerror or error}: name a file of predictions") from error
    except ValueError as error:
        raise PredictionsInvalid(f"{path}: no JSON: {error} (a file of JSON lines ends in .jsonl)") from error
    if isinstance(entries, dict):
        entries = [_keyed(name, value) for name, value in entries.items()]
    if not isinstance(entries, list):
        raise PredictionsInvalid(f"{path}: it has to hold a list of predictions, or an object of them by instance id")
    predictions: dict[str, Prediction] = {}
    for number, entry in enumerate(entries, 1):
        prediction = read_prediction(entry, f"{path.name} prediction {number}")
        if prediction.instance_id in predictions:
            raise PredictionsInvalid(f"{path}: two predictions for {prediction.instance_id}: keep one")
        predictions[prediction.instance_id] = prediction
    return list(predictions.values())


def read_prediction(entry: Any, where: str = "prediction") -> Prediction:
    """Return the prediction that a JSON object describes; keys that it does not know are left alone.

    Raises:
        PredictionsInvalid: Something is missing.
    """
    if not isinstance(entry, Mapping):
        raise PredictionsInvalid(f"{where}: it has to be an object, not {type(entry).__name__}")
    instance_id = entry.get("instance_id")
    if not isinstance(instance_id, str) or not instance_id:
        raise PredictionsInvalid(f'{where}: write "instance_id"')
    if "model_patch" not in entry:
        raise PredictionsInvalid(f'{where} ({instance_id}): write "model_patch", a unified diff, or null for none')
    patch, model = entry["model_patch"], entry.get("model_name_or_path")
    if patch is not None and not isinstance(patch, str):
        raise PredictionsInvalid(f"{where} ({instance_id}): model_patch has to be text, not {type(patch).__name__}")
    return Prediction(instance_id, patch, "None" if model is None else str(model))


def gold_predictions(dataset: Dataset) -> list[Prediction]:
    """Return the gold patches as predictions."""
    return [Prediction(instance.instance_id, instance.patch, "gold") for instance in dataset]


def dump_predictions(predictions: Iterable[Prediction]) -> str:
    """Return predictions as JSON lines."""
    return "".join(json.dumps(prediction.row()) + "\n" for prediction in predictions)


def instance_report(prediction: Prediction, resolution: Resolution | None, rules: int = 5) -> dict[str, Any]:
    """Return what the benchmark writes to ``report.json`` for one instance.

    Args:
        prediction: The prediction that was graded.
        resolution: Its verdict; None if there is none, e.g. after a timeout. Ignored if the prediction has no patch.
        rules: Version of swebench that the report follows; see `log_parsers.RULES`. Only 5 has ``infra_failure`` and
            ``infra_failure_reason``.

    Returns:
        An object with the instance id as its only key. ``patch_successfully_applied`` and ``resolved`` are False and
        ``tests_status`` is missing if the prediction has no patch, or the verdict is None or invalid.
    """
    entry: dict[str, Any] = {
        "patch_is_None": prediction.model_patch is None,
        "patch_exists": prediction.model_patch is not None,
        "patch_successfully_applied": False,
        "resolved": False,
    }
    if rules == 5:
        entry["infra_failure"] = False
    if prediction.model_patch is not None and resolution is not None:
        if resolution.invalid:
            if resolution.infra_reason and rules == 5:
                entry |= {"infra_failure": resolution.infra_failure, "infra_failure_reason": resolution.infra_reason}
        else:
            entry |= {
                "patch_successfully_applied": True,
                "resolved": resolution.resolved,
                "tests_status": tests_status(resolution),
            }
    return {prediction.instance_id: entry}


def tests_status(resolution: Resolution) -> dict[str, dict[str, list[str]]]:
    """Return both lists of tests by success and failure, with the two lists that the benchmark leaves empty."""
    lists = {
        "FAIL_TO_PASS": (resolution.fail_to_pass.success, resolution.fail_to_pass.failure),
        "PASS_TO_PASS": (resolution.pass_to_pass.success, resolution.pass_to_pass.failure),
        "FAIL_TO_FAIL": ((), ()),
        "PASS_TO_FAIL": ((), ()),
    }
    return {name: {"success": list(success), "failure": list(failure)} for name, (success, failure) in lists.items()}


def run_report(
    dataset: Dataset, predictions: Iterable[Prediction], graded: Mapping[str, Graded], rules: int = 5
) -> dict[str, Any]:
    """Return the benchmark's report of a run, and under ``rules`` the version of swebench whose rules were used.

    Args:
        dataset: All instances of the run.
        predictions: Submitted predictions; those for other instances count as submitted and nothing else.
        graded: Result of each prediction that was run, by instance id; one that is missing is an error.
        rules: Version of the benchmark's rules, 5 or 4.
    """
    if rules not in RULES:
        raise InvalidRequest(f"rules {rules!r}: there are {', '.join(map(str, RULES))}")
    submitted = {prediction.instance_id: prediction for prediction in predictions}
    ids: dict[str, list[str]] = {
        name: [] for name in ("completed", "incomplete", "empty_patch", "resolved", "unresolved", "error")
    }
    reasons: dict[str, str] = {}
    broken: list[str] = []
    ambiguous: list[str] = []
    for instance in dataset:
        name = instance.instance_id
        if name not in submitted:
            ids["incomplete"].append(name)
            continue
        if not submitted[name].model_patch:
            ids["empty_patch"].append(name)
            continue
        outcome = graded.get(name, Graded(None))
        if outcome.resolution is None:
            ids["error"].append(name)
        else:
            ids["completed"].append(name)
            ids["resolved" if outcome.resolution.resolved else "unresolved"].append(name)
            if outcome.resolution.resolved:
                continue
        reason, environment = classify(outcome.log)
        if reason:
            reasons[name] = reason
            (broken if environment else ambiguous).append(name)
    report: dict[str, Any] = {"total_instances": len(dataset), "submitted_instances": len(submitted)}
    counted = ("completed", "resolved", "unresolved", "empty_patch", "error")
    report |= {f"{name}_instances": len(ids[name]) for name in counted}
    report |= {f"{name}_ids": sorted(found) for name, found in ids.items()}
    report["submitted_ids"] = sorted(submitted)
    if rules == 5:
        report |= {
            "infra_failure_instances": len(broken),
            "ambiguous_failure_instances": len(ambiguous),
            "infra_failure_ids": sorted(broken),
            "ambiguous_failure_ids": sorted(ambiguous),
            "failure_reasons": dict(sorted(reasons.items())),
        }
    return report | {"schema_version": SCHEMA_VERSION, "rules": f"swebench {RULES[rules]}"}


def _keyed(name: str, value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return {"instance_id": name, "model_patch": value}
    return {"instance_id": name, **value} if isinstance(value, Mapping) else value
