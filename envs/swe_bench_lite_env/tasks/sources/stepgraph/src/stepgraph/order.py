"""Puts steps after what they need."""

from .errors import Cycle


def order(graph, *targets):
    """Return the targets and all that they need, each step after what it needs; without targets, all steps.

    Raises:
        Cycle: Steps need each other.
        UnknownStep: A step that is needed was not added.
    """
    done = []
    for target in targets or graph:
        _visit(graph, target, [], done)
    return done


def _visit(graph, step, path, done):
    if step in path:
        raise Cycle([*path, step])
    if step in done:
        return
    path.append(step)
    for needed in graph.needs(step):
        _visit(graph, needed, path, done)
    done.append(step)
