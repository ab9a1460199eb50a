"""Steps and what they need."""

from .errors import UnknownStep


class Graph:
    """Steps by name."""

    def __init__(self):
        self._needs = {}

    def add(self, step, needs=()):
        """Add a step; what it needs may be added later."""
        if step in self._needs:
            raise ValueError(f"{step} was added before")
        self._needs[step] = list(dict.fromkeys(needs))

    def __iter__(self):
        return iter(self._needs)

    def __len__(self):
        return len(self._needs)

    def __contains__(self, step):
        return step in self._needs

    def needs(self, step):
        """Return what a step needs itself.

        Raises:
            UnknownStep: It was not added.
        """
        if step not in self._needs:
            raise UnknownStep(step)
        return list(self._needs[step])
