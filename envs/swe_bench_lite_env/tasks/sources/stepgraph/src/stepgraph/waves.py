"""Steps that can run at the same time."""

from .order import order


def waves(graph):
    """Return lists of steps: each needs steps of earlier lists only, and stands in the first one that it can.

    Raises:
        Cycle: Steps need each other.
        UnknownStep: A step that is needed was not added.
    """
    level = {}
    for step in order(graph):
        level[step] = 1 + max((level[needed] for needed in graph.needs(step)), default=0)
    found = [[] for _ in range(max(level.values(), default=0))]
    for step in graph:
        found[level[step] - 1].append(step)
    return found
