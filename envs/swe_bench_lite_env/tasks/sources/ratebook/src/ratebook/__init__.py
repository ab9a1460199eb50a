"""Exchange rates with a cache."""

from .book import RateBook, UnknownCurrency
from .money import rounded
from .table import table

__all__ = ["RateBook", "UnknownCurrency", "rounded", "table"]
