import json
import os

from errata_verify import check, probe_json, require

HERE = os.path.dirname(os.path.abspath(__file__))


def merge(intervals):
    points = {n for start, end in intervals for n in range(start, end)}
    merged = []
    for n in sorted(points):
        if merged and merged[-1][1] == n:
            merged[-1][1] = n + 1
        else:
            merged.append([n, n + 1])
    return merged


def gaps(intervals, start, end):
    covered = {n for low, high in intervals for n in range(low, high)}
    return merge([(n, n + 1) for n in range(start, end) if n not in covered])


def overlap(one, other):
    return len(set(range(*one)) & set(range(*other)))


EXPECTED = {"merge": merge, "gaps": gaps, "overlap": overlap}


RIGHT_AT_THE_START = (
    ("merge", [[[-5, 2], [5, 7]]]),
    ("gaps", [[[2, 4], [6, 10]], 0, 10]),
    ("overlap", [[0, 6], [5, 13]]),
)


def results():
    """Return (function, arguments, result) of each case."""
    found = probe_json("calls")
    with open(os.path.join(HERE, "probe", "cases.json")) as file:
        cases = json.load(file)
    assert isinstance(found, list) and len(found) == len(cases), "not one result for each case"
    return [(name, arguments, result) for (name, arguments), result in zip(cases, found)]


def compare(name):
    for function, arguments, result in results():
        if function == name:
            wanted = EXPECTED[name](*arguments)
            assert result == [wanted, True], f"{name}{arguments}: {result}, not {wanted}"


@require
def what_was_right_still_is():
    """One function mended is worth nothing where another was broken or thrown away."""
    found = {(name, json.dumps(arguments)): result for name, arguments, result in results()}
    for name, arguments in RIGHT_AT_THE_START:
        assert found[name, json.dumps(arguments)] == [EXPECTED[name](*arguments), True], f"{name}{arguments}"


@check()
def merge_is_right():
    compare("merge")


@check()
def gaps_is_right():
    compare("gaps")


@check()
def overlap_is_right():
    compare("overlap")
