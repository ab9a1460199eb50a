"""Reads the rows of a file."""

import csv
import io

from .decode import decode


class ColumnMissing(LookupError):
    """The file has no column of that name."""


def rows(data, *columns):
    """Yield the values of some columns for each row.

    Raises:
        ColumnMissing: The header lacks one of them.
    """
    text = decode(data)
    header, _, _ = text.partition("\n")
    separator = ";" if header.count(";") > header.count(",") else ","
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    for column in columns:
        if column not in (reader.fieldnames or ()):
            raise ColumnMissing(column)
    for row in reader:
        yield tuple((row[column] or "").strip() for column in columns)
