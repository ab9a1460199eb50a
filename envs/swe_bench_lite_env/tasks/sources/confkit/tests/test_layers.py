from confkit import merged


def test_tables_are_merged():
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}) == {"a": {"b": 1, "c": 3}}


def test_the_layers_stay_as_they_are():
    first = {"a": {"b": 1}}
    merged(first, {"a": {"b": 2}})["a"]["b"] = 3
    assert first == {"a": {"b": 1}}


def test_anything_else_replaces():
    assert merged({"a": {"b": 1}}, {"a": 2}) == {"a": 2}
