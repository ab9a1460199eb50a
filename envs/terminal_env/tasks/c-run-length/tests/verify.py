from errata_verify import check, probe_json

INPUTS = [b"", b"a", b"aaab", b"ab" * 7, b"\0\0\xff\n\n", bytes(range(256)), b"x" * 130, b"y" * 1500000 + b"z"]
GOOD = ["aaab", "", "\n" * 200]


def encode(data):
    lines, at = [], 0
    while at < len(data):
        end = at
        while end < len(data) and data[end] == data[at]:
            end += 1
        lines.append(f"{end - at} {data[at]:02x}\n")
        at = end
    text = "".join(lines)
    if len(text) <= 1500:
        return text
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


@check()
def it_builds_without_warnings():
    status, _, errors = probe_json("build")["build"]
    assert status == 0, errors
    assert "warning" not in errors, errors


@check(weight=2)
def it_encodes():
    encoded = probe_json("build")["encoded"]
    assert [row[:2] for row in encoded] == [[0, encode(data)] for data in INPUTS]


@check()
def it_decodes():
    decoded = probe_json("build")["decoded"]
    assert [row[:2] for row in decoded[:3]] == [[0, text] for text in GOOD]


@check()
def it_refuses_malformed_lines():
    decoded = probe_json("build")["decoded"]
    assert len(decoded) == 9
    for row in decoded[3:]:
        assert row[0] == 1 and "rle: malformed input" in row[2], row
