import pytest

from stepgraph import Graph, waves


def test_a_step_is_added_once():
    graph = Graph()
    graph.add("a")
    with pytest.raises(ValueError):
        graph.add("a")


def test_waves_of_a_chain():
    graph = Graph()
    graph.add("b", ["a"])
    graph.add("a")
    assert waves(graph) == [["a"], ["b"]]


def test_an_empty_graph_has_no_waves():
    assert waves(Graph()) == []
