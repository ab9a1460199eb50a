"""`PluginGroup`: classes of any distribution that entry points of one group name, such as journal stores."""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from errata_protocol.errors import InvalidRequest

T = TypeVar("T")


class PluginGroup(Generic[T]):
    """The plugins of one kind. Each is imported once, when it is first asked for.

    Args:
        group: Name of the group of entry points.
        base: Class that every plugin is a subclass of.
        kind: Word for a plugin in error messages.
    """

    def __init__(self, group: str, base: type[T], kind: str) -> None:
        self._group, self._base, self._kind = group, base, kind
        self._made: dict[str, T] = {}

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """The entry points of the installed plugins by name; nothing of them is imported."""
        return {point.name: point for point in entry_points(group=self._group)}

    def check(self, name: str) -> EntryPoint:
        """Return the entry point of a plugin without importing it.

        Args:
            name: Name of the entry point.

        Raises:
            InvalidRequest: No plugin of that name is installed.
        """
        found = self.installed.get(name)
        if found is None:
            known = ", ".join(sorted(self.installed)) or "none: install the project again, `pip install .`"
            raise InvalidRequest(f"no {self._kind} {name!r} is installed; there are: {known}")
        return found

    def load(self, name: str) -> T:
        """Import a plugin and return the instance of its class, always the same one.

        Args:
            name: Name of the entry point.

        Raises:
            InvalidRequest: No plugin of that name is installed, it cannot be imported, or it is not of this kind.
        """
        point = self.check(name)
        if name not in self._made:
            what = f"{self._kind} {name!r} ({point.value})"
            try:
                found = point.load()
            except (ImportError, AttributeError) as error:
                raise InvalidRequest(f"{what} cannot be imported: {error}") from error
            if not (isinstance(found, type) and issubclass(found, self._base)):
                raise InvalidRequest(f"{what} is not an {self._base.__module__}.{self._base.__qualname__}")
            self._made[name] = found()
        return self._made[name]
