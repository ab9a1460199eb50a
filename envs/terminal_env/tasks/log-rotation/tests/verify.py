import json
import os

from errata_verify import check, probe_json

HERE = os.path.dirname(os.path.abspath(__file__))
ALWAYS = ("plain", "two")
"""Part of each check: to refuse everything, to delete everything or to overwrite old files is worth nothing."""


def rotated(case):
    """Return what the files of a case are after a rotation."""
    files = dict(case["files"])
    keep = int(case["arguments"][1])
    links = {name for name, _ in case.get("links", ())}
    for name in [n for n in files if n.endswith(".log") and "/" not in n and n not in links and files[n]]:
        old = {}
        for other in list(files):
            number = other.removeprefix(name + ".")
            if other != number and number.isdigit():
                old[int(number)] = files.pop(other)
        old[0] = files[name]
        files[name] = ""
        files |= {f"{name}.{number + 1}": content for number, content in old.items() if number + 1 <= keep}
    return files | {name: "link " + target for name, target in case.get("links", ())}


def compare(*names):
    with open(os.path.join(HERE, "probe", "cases.json")) as file:
        cases = json.load(file)
    results = probe_json("rotations")
    for name in (*ALWAYS, *names):
        result, after = results[name]
        assert result == [0, 0, 0], f"{name}: {result}"
        assert after == rotated(cases[name]), f"{name}: {after}"


@check(weight=2)
def files_are_rotated():
    compare("first", "limit")


@check()
def many_old_files_and_gaps():
    compare("lower", "gap")


@check()
def odd_names():
    compare("names")


@check()
def what_is_left_alone():
    compare("empty", "below", "link")


@check()
def wrong_calls_change_nothing():
    compare()
    results = probe_json("rotations")
    for name in ("no_directory", "zero", "word", "no_keep"):
        result, after = results[name]
        assert result == [2, 0, 1], f"{name}: {result}"
        assert after == {"a.log": "x"}, f"{name}: {after}"
