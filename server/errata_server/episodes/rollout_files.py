"""Writes rollout rows as JSON lines or as Parquet."""

from __future__ import annotations

from importlib.metadata import distribution
from typing import Any, BinaryIO

from pydantic import BaseModel

from errata_protocol.errors import NotSupported
from errata_protocol.install_hint import DISTRIBUTION, install_hint
from errata_protocol.markers import ErrorSite
from errata_protocol.rollouts import SCHEMA_VERSION

GROUP_ROWS = 1_000
GROUP_BYTES = 32 * 1024**2
"""A Parquet row group is written at whichever limit is reached first; its rows are buffered in memory."""


class JsonLines:
    """Writes each row as one line of JSON.

    Args:
        file: Binary file open for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, row: BaseModel) -> None:
        """Append a row."""
        self._file.write(row.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        """Do nothing: rows are not buffered."""


class Parquet:
    """Writes rows as Parquet, in row groups of bounded size, compressed with zstd.

    Args:
        file: Open for writing.
        by: Type of the rows: ``turn`` or ``episode``.

    Raises:
        NotSupported: pyarrow is not installed.
    """

    def __init__(self, file: BinaryIO, by: str) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            came_from = distribution(DISTRIBUTION).read_text("direct_url.json")
            raise NotSupported(f"Parquet needs pyarrow: {install_hint('parquet', came_from)}") from error
        self._pyarrow = pyarrow
        self._schema = _schema(pyarrow, by)
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, row: BaseModel) -> None:
        """Append a row."""
        values = row.model_dump()
        self._rows.append(values)
        for turn in values.get("turns", (values,)):
            self._bytes += sum(len(turn[name] or "") for name in ("state_t", "agent_text_t", "action_t"))
        if len(self._rows) >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the last row group and the footer."""
        if self._rows:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_table(self._pyarrow.Table.from_pylist(self._rows, self._schema))
        self._rows, self._bytes = [], 0


def _schema(pa: Any, by: str) -> Any:
    """Return the Arrow schema of a row; tests check that its field names are those of the Pydantic models."""
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    site_types = {"t": whole, "line": whole, "column": whole, "action_span": pa.list_(whole)}
    site = pa.struct([(name, site_types.get(name, text)) for name in ErrorSite.model_fields])
    marker = pa.struct([("error_kind", text), ("hint_template_key", text), ("severity", text), ("error_site", site)])
    late = pa.struct([("value", real), ("source", text), ("reward_id", text)])
    failed = pa.struct([("kind", text), ("action", text), ("code", text), ("message", text)])
    turn = [
        ("t", whole),
        ("kind", text),
        ("state_t", pa.large_string()),
        ("agent_text_t", pa.large_string()),
        ("action_t", pa.large_string()),
        ("reward_t", real),
        ("late_rewards_t", pa.list_(late)),
        ("late_reward_t", real),
        ("error_marker_t", marker),
        ("done", pa.bool_()),
        ("digest", text),
        ("semantic_digest", text),
        ("errors_t", pa.list_(failed)),
        ("created", real),
    ]
    episode = [
        ("schema_version", pa.int32()),
        ("eid", text),
        ("episode_id", text),
        ("environment", text),
        ("session", text),
        ("origin_eid", text),
        ("origin_t", whole),
        ("agent_text_version", text),
    ]
    if by == "turn":
        fields = [*episode, *turn]
    else:
        totals = [("created", real), ("done", pa.bool_()), ("reward", real), ("late_reward", real)]
        fields = [*episode, *totals, ("turns", pa.list_(pa.struct(turn)))]
    return pa.schema(fields, metadata={"errata_schema_version": str(SCHEMA_VERSION), "errata_rows": by})
