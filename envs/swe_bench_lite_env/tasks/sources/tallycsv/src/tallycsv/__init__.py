"""Sums of columns of CSV files."""

from .numbers import NumberInvalid, number
from .report import report
from .rows import ColumnMissing, rows
from .totals import totals

__all__ = ["ColumnMissing", "NumberInvalid", "number", "report", "rows", "totals"]
