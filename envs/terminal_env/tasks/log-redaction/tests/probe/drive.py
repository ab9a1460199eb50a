"""Runs the agent's filter on each case and prints what comes out."""

import json
import subprocess
import sys

with open("/probe/cases.json") as file:
    cases = json.load(file)
out = {}
for name, case in cases.items():
    data = case.encode("latin-1")
    try:
        done = subprocess.run(["/workspace/redact"], cwd="/tmp", input=data, capture_output=True, timeout=10)
        out[name] = [done.returncode, done.stdout[:20000].decode("latin-1")]
    except (OSError, subprocess.TimeoutExpired) as error:
        out[name] = [type(error).__name__, ""]
json.dump(out, sys.stdout)
