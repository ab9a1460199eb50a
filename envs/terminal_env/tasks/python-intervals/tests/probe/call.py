"""Calls the agent's functions on every case and prints what they return."""

import copy
import json
import sys

sys.path.insert(0, "/workspace/intervals")
import intervals


def plain(value):
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


results = []
with open("/probe/cases.json") as file:
    cases = json.load(file)
for name, arguments in cases:
    given = [[tuple(i) for i in a] if name != "overlap" and isinstance(a, list) else a for a in arguments]
    given = [tuple(a) for a in given] if name == "overlap" else given
    before = copy.deepcopy(given)
    try:
        value = plain(getattr(intervals, name)(*given))
    except Exception as error:
        value = f"{type(error).__name__}: {error}"
    results.append([value, given == before])
json.dump(results, sys.stdout)
