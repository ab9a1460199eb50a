"""Finds the value under a dotted key."""

from .errors import MissingKey


def walk(table, key):
    """Return the value under `key`: parts are keys of tables, or indexes of lists.

    Raises:
        MissingKey: There is no such value.
    """
    value = table
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        else:
            try:
                value = value[part]
            except KeyError:
                raise MissingKey(key, "no such key") from None
    return value
