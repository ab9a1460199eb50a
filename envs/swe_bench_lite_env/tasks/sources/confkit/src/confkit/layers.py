"""Lays tables over each other."""


def merged(*layers):
    """Return one table of all layers: tables are merged, anything else of a later layer replaces the earlier."""
    result = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(result.get(key), dict):
                result[key] = merged(result[key], value)
            elif isinstance(value, dict):
                result[key] = merged(value)
            else:
                result[key] = value
    return result
