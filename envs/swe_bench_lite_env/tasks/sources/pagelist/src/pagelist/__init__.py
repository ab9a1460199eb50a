"""Pages of a list, and the links between them."""

from .links import GAP, link_row, next_and_previous
from .page import Page
from .paginator import NoSuchPage, Paginator

__all__ = ["GAP", "NoSuchPage", "Page", "Paginator", "link_row", "next_and_previous"]
