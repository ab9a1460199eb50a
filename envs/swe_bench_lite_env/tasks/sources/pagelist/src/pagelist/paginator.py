"""Cuts a list into pages."""

from .page import Page


class NoSuchPage(LookupError):
    """There is no page of that number."""


class Paginator:
    """Pages of `per_page` items.

    At most `orphans` items at the end do not make a page of their own: they are put on the page before.
    """

    def __init__(self, items, per_page=10, orphans=0):
        if per_page < 1:
            raise ValueError(f"per_page has to be 1 or more, not {per_page}")
        if not 0 <= orphans < per_page:
            raise ValueError(f"orphans has to be 0 or more and below per_page, not {orphans}")
        self.items = list(items)
        self.per_page = per_page
        self.orphans = orphans

    @property
    def total(self):
        return len(self.items)

    @property
    def number_of_pages(self):
        """At least 1: an empty list has one empty page."""
        full, rest = divmod(self.total, self.per_page)
        if rest and (rest >= self.orphans or full == 0):
            full += 1
        return max(full, 1)

    def page(self, number):
        """Return a page, counted from 1."""
        if not 1 <= number <= self.number_of_pages:
            raise NoSuchPage(f"page {number} of {self.number_of_pages}")
        start = (number - 1) * self.per_page
        end = self.total if number == self.number_of_pages else start + self.per_page
        items = tuple(self.items[start:end])
        first = start + 1 if items else 0
        return Page(number, items, first, start + len(items), self.total)

    def page_of(self, index):
        """Return the number of the page that holds the item at an index, counted from 0."""
        if not 0 <= index < self.total:
            raise IndexError(f"item {index} of {self.total}")
        return index // self.per_page + 1

    def __iter__(self):
        for number in range(1, self.number_of_pages + 1):
            yield self.page(number)
