"""One route."""

import re

from .converters import CONVERTERS

_VARIABLE = re.compile(r"<(?:(\w+):)?(\w+)>")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class RouteInvalid(ValueError):
    """A route that cannot be added."""


class Route:
    """A path with variables, the methods it takes, and the function that answers."""

    def __init__(self, path, methods, answer):
        if not path.startswith("/"):
            raise RouteInvalid(f"{path}: a path begins with /")
        self.path = path
        self.methods = frozenset(method.upper() for method in methods)
        self.answer = answer
        unknown = self.methods - set(METHODS)
        if unknown:
            raise RouteInvalid(f"{path}: unknown method {sorted(unknown)[0]}")
        self._converters = {}
        pattern, end = "", 0
        for variable in _VARIABLE.finditer(path):
            kind, name = variable[1] or "text", variable[2]
            if kind not in CONVERTERS:
                raise RouteInvalid(f"{path}: unknown converter {kind}")
            expression, self._converters[name] = CONVERTERS[kind]
            pattern += re.escape(path[end : variable.start()]) + f"(?P<{name}>{expression.pattern})"
            end = variable.end()
        self._pattern = re.compile(pattern + re.escape(path[end:]))

    def match(self, path):
        """Return the variables of a path, None where the route does not have it."""
        found = self._pattern.fullmatch(path)
        if found is None:
            return None
        return {name: convert(found[name]) for name, convert in self._converters.items()}
