"""Calls the agent's script on one directory after another and prints what is there then."""

import json
import os
import subprocess
import sys
import tempfile


def call(files, *arguments, links=(), folders=()):
    directory = tempfile.mkdtemp(prefix="logs ")
    for name in folders:
        os.mkdir(os.path.join(directory, name))
    for name, content in files.items():
        with open(os.path.join(directory, name), "w") as file:
            file.write(content)
    for name, target in links:
        os.symlink(target, os.path.join(directory, name))
    command = ["bash", "/workspace/rotate.sh", *(directory if a == "DIR" else a for a in arguments)]
    try:
        done = subprocess.run(command, cwd="/tmp", stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
        result = [done.returncode, len(done.stdout), len(done.stderr.splitlines())]
    except (OSError, subprocess.TimeoutExpired) as error:
        result = [type(error).__name__, 0, 0]
    after = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            full = os.path.join(folder, name)
            if os.path.islink(full):
                after[os.path.relpath(full, directory)] = "link " + os.readlink(full)
            elif os.path.isfile(full):
                with open(full, errors="replace") as file:
                    after[os.path.relpath(full, directory)] = file.read(200)
    return [result, after]


with open("/probe/cases.json") as file:
    cases = json.load(file)
out = {}
for name, case in cases.items():
    out[name] = call(case["files"], *case["arguments"], links=case.get("links", ()), folders=case.get("folders", ()))
json.dump(out, sys.stdout)
