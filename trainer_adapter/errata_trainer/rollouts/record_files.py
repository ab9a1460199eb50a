"""Rollouts, SDPO items and DPO pairs in files: JSON lines or Parquet, schema version 1 (docs/rollouts.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from importlib.metadata import distribution
from itertools import islice
from operator import index
from pathlib import Path
from typing import Any, TypeVar

from errata_protocol.install_hint import DISTRIBUTION, install_hint
from errata_protocol.rollouts import ErrorMarker

from .json_values import float_of, number_of, of_type, plain_of
from .rollout import Call, DpoPair, Rollout, SdpoItem, Turn

SCHEMA_VERSION = 1
"""A field may be added in version 1; a reader ignores what it does not know, and refuses another version."""

Record = Rollout | SdpoItem | DpoPair
R = TypeVar("R", Rollout, SdpoItem, DpoPair)

KINDS: dict[str, type[Rollout] | type[SdpoItem] | type[DpoPair]] = {
    "rollout": Rollout,
    "sdpo_item": SdpoItem,
    "dpo_pair": DpoPair,
}
_NAMES: dict[type, str] = {cls: name for name, cls in KINDS.items()}
_KINDS = ", ".join(cls.__name__ for cls in KINDS.values())
_INTS = frozenset(
    {"prompt_ids", "completion_ids", "mask", "teacher_ids", "student_positions", "teacher_positions", "target_ids",
     "context_ids", "chosen_ids", "rejected_ids"}
)  # fmt: skip
_MAPPINGS = frozenset({"task", "votes"})
_FLOATS = frozenset({"reward", "weight", "ref_chosen", "ref_rejected"})
_INDICES = frozenset({"turn", "t", "shared_prefix"})
_NEVER_NULL = frozenset({"turns", "turn", "shared_prefix", "weight", "truncated"}) | _INTS | _MAPPINGS
_PLACE = ("index", "start", "stop")
_ROWS = 1000  # a Parquet row group


def to_json(record: Record) -> dict[str, Any]:
    """Return a record as JSON values, with ``schema_version`` and ``record``.

    A float that is not finite is the text ``NaN``, ``Infinity`` or ``-Infinity``, since JSON has none; also within
    ``task`` and the arguments of a call, where a student may have written one and where a reader leaves the text.

    Raises:
        TypeError: No `Rollout`, `SdpoItem` or `DpoPair`; ids that are no integers; a value of a mapping that JSON has
            not, or a key that is no text.
    """
    row: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "record": _name_of(record)}
    for item in fields(record):
        value = getattr(record, item.name)
        if item.name == "turns":
            value = [_turn_to_json(turn) for turn in value]
        elif item.name == "logprobs":
            value = None if value is None else [number_of(one) for one in value]
        elif item.name in _FLOATS:
            value = None if value is None else number_of(value)
        elif item.name in _INTS:
            value = [int(index(one)) for one in value]  # a mask may be of bools, ids of NumPy
        elif item.name in _MAPPINGS:
            value = plain_of(value, item.name)
        elif isinstance(value, tuple):
            value = list(value)
        row[item.name] = value
    return row


def from_json(row: Mapping[str, Any]) -> Record:
    """Return the record of `to_json`'s values.

    Raises:
        ValueError: Another schema version, an unknown kind of record, or a field that is missing or of another type.
    """
    version, kind = row.get("schema_version"), row.get("record")
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema version {version!r}, this reader knows {SCHEMA_VERSION}")
    cls = KINDS.get(str(kind))
    if cls is None:
        raise ValueError(f"no kind of record is called {kind!r}")
    try:
        given = {item.name: _from_json(item.name, row[item.name]) for item in fields(cls) if item.name in row}
        return cls(**given)
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"a {kind} cannot be made of this row: {error}") from error


def write_records(path: str | os.PathLike[str], records: Iterable[Record]) -> int:
    """Write records to a ``.jsonl`` or ``.parquet`` file, which appears when it is complete.

    Args:
        path: File to write; its suffix, ``.jsonl`` or ``.parquet``, gives the format. A Parquet file holds one kind of
            record.
        records: Records to write; they are read once, and a thousand are in memory at a time.

    Returns:
        How many.

    Raises:
        ValueError: Another suffix, or several kinds of record in a Parquet file.
        TypeError: Something else than the three kinds of record; ids that are no integers; a task or an argument that
            is no JSON value, or has keys that are no texts.
        ModuleNotFoundError: Parquet without pyarrow.
    """
    target = Path(path)
    write = {".jsonl": _write_jsonl, ".parquet": _write_parquet}.get(target.suffix)
    if write is None:
        raise ValueError(f"{target}: records are written to .jsonl or .parquet")
    checked = _checked(target, records, one_kind=target.suffix == ".parquet")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        count = write(partial, checked)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return count


def read_records(path: str | os.PathLike[str], kind: type[R]) -> Iterator[R]:
    """Yield the records of one kind, in order; records of other kinds in the file are skipped.

    Args:
        path: File to read; its suffix, ``.jsonl`` or ``.parquet``, gives the format.
        kind: Kind of record: `Rollout`, `SdpoItem` or `DpoPair`.

    Raises:
        TypeError: Another kind.
        ValueError: Another suffix, or a row that is none; the message says where.
        ModuleNotFoundError: Parquet without pyarrow.
    """
    if kind not in _NAMES:
        raise TypeError(f"kind is {kind!r}: one of {_KINDS}")
    source = Path(path)
    read = {".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(source.suffix)
    if read is None:
        raise ValueError(f"{source}: records are read from .jsonl or .parquet")
    for number, row in read(source):
        try:
            record = from_json(row)
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}") from error
        if isinstance(record, kind):
            yield record


def _name_of(record: object) -> str:
    name = _NAMES.get(type(record))
    if name is None:
        raise TypeError(f"a {type(record).__name__} is no record: one of {_KINDS}")
    return name


def _checked(target: Path, records: Iterable[Record], *, one_kind: bool) -> Iterator[Record]:
    """Yield records after checking that the file format can hold them."""
    first = None
    for number, record in enumerate(records):
        try:
            name = _name_of(record)
        except TypeError as error:
            raise TypeError(f"{target}, record {number}: {error}") from error
        first = name if first is None else first
        if one_kind and name != first:
            raise ValueError(
                f"{target}: a Parquet file holds one kind of record, this one began with {first}, "
                f"record {number} is of {name}: write .jsonl, or a file for each kind"
            )
        yield record


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    calls = [
        {
            "name": call.name,
            "arguments": plain_of(call.arguments, f"turns[{turn.index}].calls[{number}].arguments"),
            "t": call.t,
            "marker": None if call.marker is None else call.marker.model_dump(exclude_none=True),
        }
        for number, call in enumerate(turn.calls)
    ]
    return {"index": turn.index, "start": turn.start, "stop": turn.stop, "calls": calls}


def _turn_from_json(turn: Any) -> Turn:
    turn = of_type(turn, dict, "a turn", "an object")
    calls = tuple(
        Call(
            of_type(call["name"], str, "a call's name", "a text"),
            of_type(call["arguments"], dict, "a call's arguments", "an object"),
            None if call.get("t") is None else of_type(call["t"], int, "a call's t", "an integer or null"),
            None if call.get("marker") is None else ErrorMarker.model_validate(call["marker"]),
        )
        for call in of_type(turn["calls"], list, "calls", "a list")
    )
    at, start, stop = (of_type(turn[name], int, f"a turn's {name}", "an integer") for name in _PLACE)
    return Turn(at, start, stop, calls)


def _from_json(name: str, value: Any) -> Any:
    """Return a field converted to the type that its record declares; TypeError if the value has another type."""
    if value is None and name not in _NEVER_NULL:
        return None
    if name == "turns":
        return tuple(_turn_from_json(turn) for turn in of_type(value, list, name, "a list"))
    if name in _INTS:
        if not set(map(type, of_type(value, list, name, "a list of integers"))) <= {int}:
            raise TypeError(f"{name} holds something else than integers")
        return tuple(value)
    if name == "logprobs":
        return tuple(float_of(one, name) for one in of_type(value, list, name, "a list of numbers or null"))
    if name in _FLOATS:
        return float_of(value, name)
    if name in _INDICES:
        return of_type(value, int, name, "an integer")
    if name == "truncated":
        return of_type(value, bool, name, "true or false")
    if name == "votes":
        for vote in of_type(value, dict, name, "an object").values():
            if vote is not None:
                of_type(vote, str, "a vote", "a text or null")
    return of_type(value, dict, name, "an object") if name in _MAPPINGS else of_type(value, str, name, "a text")


def _write_jsonl(path: Path, records: Iterator[Record]) -> int:
    count = 0
    with path.open("w", encoding="ascii", newline="\n") as file:
        for record in records:
            file.write(json.dumps(to_json(record), allow_nan=False, separators=(",", ":")) + "\n")
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def _read_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, row {number}: no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, row {number}: no JSON object")
            yield number, row


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        came_from = distribution(DISTRIBUTION).read_text("direct_url.json")
        raise ModuleNotFoundError(
            f"Parquet needs pyarrow: {install_hint('parquet', came_from)}, or write .jsonl", name="pyarrow"
        ) from error
    return pyarrow, pyarrow.parquet


def _parquet_schema(pa: Any, cls: type) -> Any:
    ids = pa.list_(pa.int32())
    turn = pa.struct(
        [("index", pa.int32()), ("start", pa.int32()), ("stop", pa.int32()), ("calls", pa.large_string()),
         ("error_kind", pa.string())]
    )  # fmt: skip
    types = {"turns": pa.list_(turn), "logprobs": pa.list_(pa.float64()), "mask": pa.list_(pa.int8())}
    types |= dict.fromkeys(_INTS - {"mask"}, ids)
    types |= dict.fromkeys(_MAPPINGS, pa.large_string())
    types |= dict.fromkeys(_FLOATS, pa.float64())
    types |= dict.fromkeys(("turn", "t", "shared_prefix"), pa.int32())
    types |= {"truncated": pa.bool_()}
    columns = [(item.name, types.get(item.name, pa.string())) for item in fields(cls)]
    meta = {"errata_record": _NAMES[cls], "errata_schema_version": str(SCHEMA_VERSION)}
    return pa.schema([("schema_version", pa.int32()), ("record", pa.string()), *columns], metadata=meta)


def _write_parquet(path: Path, records: Iterator[Record]) -> int:
    pa, parquet = _pyarrow()
    first = next(records, None)
    cls = type(first) if first is not None else Rollout
    schema = _parquet_schema(pa, cls)
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        rest: Iterator[Record] = iter(()) if first is None else _chain(first, records)
        while batch := list(islice(rest, _ROWS)):
            writer.write_table(pa.Table.from_pylist([_parquet_row(record) for record in batch], schema=schema))
            count += len(batch)
    return count


def _chain(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest


def _parquet_row(record: Record) -> dict[str, Any]:
    row = to_json(record)
    for name in _MAPPINGS & row.keys():
        row[name] = json.dumps(row[name], allow_nan=False)
    for name in _FLOATS & row.keys():
        row[name] = getattr(record, name)
    if isinstance(record, Rollout):
        row["logprobs"] = record.logprobs
        for turn, plain in zip(record.turns, row["turns"], strict=True):
            failed = turn.failed
            plain["calls"] = json.dumps(plain["calls"], allow_nan=False)
            plain["error_kind"] = failed.marker.error_kind if failed is not None and failed.marker is not None else None
    return row


def _read_parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    _, parquet = _pyarrow()
    with parquet.ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS):
            for row in batch.to_pylist():
                for name in _MAPPINGS & row.keys():
                    row[name] = json.loads(row[name])
                for turn in row.get("turns") or ():
                    turn["calls"] = json.loads(turn["calls"])
                yield number, row
                number += 1
