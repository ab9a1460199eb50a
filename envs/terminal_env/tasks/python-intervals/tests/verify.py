import json
import os

from errata_verify import check, probe_json

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


def compare(name):
    results = probe_json("calls")
    with open(os.path.join(HERE, "probe", "cases.json")) as file:
        cases = json.load(file)
    assert isinstance(results, list) and len(results) == len(cases), "not one result for each case"
    for (function, arguments), result in zip(cases, results):
        if function == name:
            wanted = EXPECTED[name](*arguments)
            assert result == [wanted, True], f"{name}{arguments}: {result}, not {wanted}"


@check()
def merge_is_right():
    compare("merge")


@check()
def gaps_is_right():
    compare("gaps")


@check()
def overlap_is_right():
    compare("overlap")
