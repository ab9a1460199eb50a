"""What applications use."""

from .errors import MissingKey, WrongType
from .layers import merged
from .walk import walk

_REQUIRED = object()


class Config:
    """Several tables, the later ones laid over the earlier."""

    def __init__(self, *layers):
        self._table = merged(*layers)

    def get(self, key, default=_REQUIRED):
        """Return the value under a dotted key; `default` where there is none.

        Raises:
            MissingKey: There is none, and no default.
        """
        try:
            return walk(self._table, key)
        except MissingKey:
            if default is _REQUIRED:
                raise
            return default

    def __contains__(self, key):
        return self.get(key, default=_REQUIRED) is not _REQUIRED

    def integer(self, key, default=_REQUIRED):
        """Return a whole number; text that holds one is read.

        Raises:
            MissingKey: See `get`.
            WrongType: It is none.
        """
        value = self.get(key, default)
        if isinstance(value, int):
            return value
        return int(value)

    def boolean(self, key, default=_REQUIRED):
        """Return True or False; the texts yes, no, on, off, true and false are read.

        Raises:
            MissingKey: See `get`.
            WrongType: It is none of these.
        """
        value = self.get(key, default)
        if isinstance(value, bool):
            return value
        text = str(value).lower()
        if text in ("yes", "on", "true"):
            return True
        if text in ("no", "off", "false"):
            return False
        raise WrongType(key, f"{value!r} is neither true nor false")
