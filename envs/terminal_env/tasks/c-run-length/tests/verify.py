import hashlib

from errata_verify import check, data, probe_json, require

INPUTS = [b"", b"a", b"aaab", b"ab" * 7, b"\0\0\xff\n\n", bytes(range(256)), b"x" * 130, b"y" * 1500000 + b"z"]
GOOD = [b"aaab", b"", b"\n" * 200, bytes(range(256)), b"y" * 1500000 + b"\0\0"]


def shown(content):
    return hashlib.sha256(content).hexdigest() if len(content) > 1500 else content.decode("latin-1")


def encode(data):
    lines, at = [], 0
    while at < len(data):
        end = at
        while end < len(data) and data[end] == data[at]:
            end += 1
        lines.append(f"{end - at} {data[at]:02x}\n")
        at = end
    return "".join(lines).encode()


@require
def the_files_and_functions_are_kept():
    for name in ("Makefile", "main.c", "rle.c", "rle.h"):
        data("rle/" + name)
    found = probe_json("build")
    assert found["compiled"], "rle is no compiled program"
    assert found["functions"][0] == 0, found["functions"]


def it_still_counts_runs():
    """The program does so at the start, once it builds; it forgets the last run."""
    status, output, _ = probe_json("build")["encoded"][3]
    assert status == 0 and len(output) >= 40 and shown(encode(INPUTS[3])).startswith(output), output


@check(needs=[it_still_counts_runs])
def it_builds_without_warnings():
    """What hides warnings or goes on after an error does so with worse sources too."""
    found = probe_json("build")
    assert found["build"]["status"] == 0 and not found["build"]["warns"], found["build"]
    assert all(build["status"] != 0 or build["warns"] for build in found["warned"]), "warnings are hidden"
    assert all(build["status"] not in (0, None) for build in found["wrong"]), "errors are hidden"


@check(weight=2)
def it_encodes():
    encoded = probe_json("build")["encoded"]
    assert [row[:2] for row in encoded] == [[0, shown(encode(data))] for data in INPUTS]


@check()
def it_decodes():
    decoded = probe_json("build")["decoded"]
    assert [row[:2] for row in decoded] == [[0, shown(content)] for content in GOOD]


@check(needs=[it_decodes])
def it_refuses_malformed_lines():
    refused = probe_json("build")["refused"]
    assert len(refused) == 6
    for row in refused:
        assert row[0] == 1 and "rle: malformed input" in row[2], row
