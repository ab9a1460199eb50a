import pytest

from routetable import Route, RouteInvalid


@pytest.mark.parametrize("path", ["items", "/<float:x>"])
def test_paths_that_cannot_be_are_refused(path):
    with pytest.raises(RouteInvalid):
        Route(path, ["GET"], None)


def test_an_unknown_method_is_refused():
    with pytest.raises(RouteInvalid, match="FETCH"):
        Route("/", ["fetch"], None)


def test_dots_are_no_patterns():
    assert Route("/a.b", ["GET"], None).match("/axb") is None
    assert Route("/a.b", ["GET"], None).match("/a.b") == {}
