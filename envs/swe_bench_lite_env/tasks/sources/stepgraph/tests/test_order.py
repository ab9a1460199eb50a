import pytest

from stepgraph import Cycle, Graph, UnknownStep, order


def made(**needs):
    graph = Graph()
    for step, needed in needs.items():
        graph.add(step, needed.split())
    return graph


def test_a_chain():
    graph = made(deploy="test", test="build", build="")
    assert order(graph) == ["build", "test", "deploy"]
    assert order(graph, "test") == ["build", "test"]


def test_steps_without_needs_keep_their_order():
    assert order(made(c="", a="", b="")) == ["c", "a", "b"]


def test_a_circle_is_named():
    with pytest.raises(Cycle) as caught:
        order(made(a="b", b="c", c="a"))
    assert caught.value.steps == ["a", "b", "c", "a"]


def test_a_step_that_needs_itself_is_a_circle():
    with pytest.raises(Cycle, match="a -> a"):
        order(made(a="a"))


def test_an_unknown_step_is_refused():
    with pytest.raises(UnknownStep, match="x"):
        order(made(a="x"))
