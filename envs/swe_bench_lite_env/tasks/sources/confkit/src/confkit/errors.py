"""The errors of this package."""


class ConfigError(Exception):
    """A configuration that cannot be used; `key` is the dotted key at fault."""

    def __init__(self, key, message):
        super().__init__(f"{key}: {message}")
        self.key = key


class MissingKey(ConfigError, LookupError):
    """No layer has the key."""


class WrongType(ConfigError, TypeError):
    """The value under the key is of another type."""
