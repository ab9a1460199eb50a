"""One page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """Items `first` to `last` of `total`, both counted from 1; an empty page has first 0 and last 0."""

    number: int
    items: tuple
    first: int
    last: int
    total: int

    def __len__(self):
        return len(self.items)

    @property
    def summary(self):
        if not self.items:
            return "no items"
        if self.first == self.last:
            return f"{self.first} of {self.total}"
        return f"{self.first}-{self.last} of {self.total}"
