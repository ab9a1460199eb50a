import json
import os

from errata_verify import check, mode, probe_json

HERE = os.path.dirname(os.path.abspath(__file__))
UNCHANGED = ("nothing_private", "empty")
"""Also what `cat` does: worth nothing alone."""


def filtered(*names):
    assert mode("redact") & 0o100, "redact cannot be run"
    with open(os.path.join(HERE, "expected.json")) as file:
        expected = json.load(file)
    results = probe_json("filtered")
    for name in (*names, *UNCHANGED):
        assert results[name] == [0, expected[name]], f"{name}: {results[name]}"


@check()
def secrets():
    filtered("secrets", "secrets_in_a_row")


@check()
def emails():
    filtered("emails")


@check()
def addresses():
    filtered("addresses")


@check()
def cards():
    filtered("cards")


@check()
def all_in_order_and_byte_for_byte():
    filtered("order", "ends", "other_bytes")
