"""Builds the agent's program and prints what it does with each input, then what its build does with worse sources."""

import glob
import hashlib
import json
import os
import subprocess
import sys
import tempfile

HERE = "/workspace/rle"
INPUTS = [b"", b"a", b"aaab", b"ab" * 7, b"\0\0\xff\n\n", bytes(range(256)), b"x" * 130, b"y" * 1500000 + b"z"]
GOOD = [b"3 61\n1 62\n", b"", b"200 0a\n", b"".join(b"1 %02x\n" % n for n in range(256)), b"1500000 79\n2 00\n"]
MALFORMED = [b"0 61\n", b"1 100\n", b"x 61\n", b"2\n", b"2 61 7\n", b"2 61\nboo\n"]
WARNED = "\nstatic int probed(void) { int unused; return 0; }\n"
WRONG = "\n#error probed\n"
HEADER = "#pragma GCC system_header\n#include_next <stdio.h>\n"
CHANGED_HEADER = "#include_next <stdio.h>\n"
FUNCTIONS = """
#include "rle.h"
int main(void)
{
    void (*encode)(const unsigned char *, size_t, FILE *) = rle_encode;
    int (*decode)(FILE *, FILE *) = rle_decode;
    return encode == NULL || decode == NULL;
}
"""


def call(arguments, data=b"", limit=10):
    try:
        done = subprocess.run(arguments, cwd=HERE, input=data, capture_output=True, timeout=limit)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [None, type(error).__name__, ""]
    out = done.stdout if len(done.stdout) <= 1500 else hashlib.sha256(done.stdout).hexdigest().encode()
    return [done.returncode, out.decode("latin-1"), done.stderr[-200:].decode("latin-1")]


def build():
    """Return the status of `make clean all`, whether it warns, and its last words."""
    try:
        done = subprocess.run(
            ["make", "clean", "all"],
            cwd=HERE,
            env={**os.environ, "CPATH": HEADERS},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"status": None, "warns": False, "said": type(error).__name__}
    said = done.stderr + done.stdout
    return {"status": done.returncode, "warns": b"warning" in said, "said": said[-200:].decode("latin-1")}


def build_with(addition):
    """Return how it builds when something is added to rle.c."""
    name = os.path.join(HERE, "rle.c")
    try:
        with open(name, "rb") as file:
            content = file.read()
        with open(name, "ab") as file:
            file.write(addition.encode())
        result = build()
        with open(name, "wb") as file:
            file.write(content)
    except OSError as error:
        return {"status": None, "warns": False, "said": type(error).__name__}
    return result


def build_below(addition):
    """Return how it builds when something is added to a header of the system, and to no file of the program."""
    write_header(CHANGED_HEADER + addition)
    result = build()
    write_header(HEADER)
    return result


def write_header(content):
    with open(os.path.join(HEADERS, "stdio.h"), "w") as file:
        file.write(content)


def compiled():
    try:
        with open(os.path.join(HERE, "rle"), "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


HEADERS = tempfile.mkdtemp()
write_header(HEADER)
out = {"build": build(), "compiled": compiled()}
out["encoded"] = [call(["./rle", "encode"], data) for data in INPUTS]
out["decoded"] = [call(["./rle", "decode"], data) for data in GOOD]
out["refused"] = [call(["./rle", "decode"], data) for data in MALFORMED]
sources = [name for name in sorted(glob.glob(os.path.join(HERE, "*.c"))) if os.path.basename(name) != "main.c"]
command = ["gcc", "-w", "-I", HERE, "-x", "c", "-", *sources, "-o", "/tmp/functions"]
out["functions"] = call(command, FUNCTIONS.encode(), 30)
# A Makefile can know by a checksum that its sources were changed, so the headers of the system are changed as well.
out["warned"] = [build_with(WARNED), build_below("#warning probed\n")]
out["wrong"] = [build_with(WRONG), build_below(WRONG)]
json.dump(out, sys.stdout)
