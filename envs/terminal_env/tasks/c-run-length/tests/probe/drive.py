"""Builds the agent's program and prints what it does with each input."""

import hashlib
import json
import subprocess
import sys

INPUTS = [b"", b"a", b"aaab", b"ab" * 7, b"\0\0\xff\n\n", bytes(range(256)), b"x" * 130, b"y" * 1500000 + b"z"]
LINES = [b"3 61\n1 62\n", b"", b"200 0a\n", b"0 61\n", b"1 100\n", b"x 61\n", b"2\n", b"2 61 7\n", b"2 61\nboo\n"]


def call(arguments, data, limit):
    try:
        done = subprocess.run(arguments, cwd="/workspace/rle", input=data, capture_output=True, timeout=limit)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [None, type(error).__name__, ""]
    out = done.stdout if len(done.stdout) <= 1500 else hashlib.sha256(done.stdout).hexdigest().encode()
    return [done.returncode, out.decode("latin-1"), done.stderr[-200:].decode("latin-1")]


build = call(["make", "clean", "all"], b"", 30)
encoded = [call(["./rle", "encode"], data, 10) for data in INPUTS]
decoded = [call(["./rle", "decode"], data, 10) for data in LINES]
json.dump({"build": build, "encoded": encoded, "decoded": decoded}, sys.stdout)
