"""References of images: what the engine's grammar takes, and what an image has to carry."""

from __future__ import annotations

import pytest

from errata_sandboxd.names import Reference, segment

from .attacker import Attacker
from .fake_engine import FakeEngine

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("errata/base", Reference("errata/base", "latest", None)),
        ("errata/base:default", Reference("errata/base", "default", None)),
        ("debian", Reference("debian", "latest", None)),
        ("library/debian:12", Reference("debian", "12", None)),
        ("docker.io/library/debian:12", Reference("debian", "12", None)),
        ("docker.io/errata/base", Reference("errata/base", "latest", None)),
        ("localhost:5000/a/b__c--d.e:V_1.2-3", Reference("localhost:5000/a/b__c--d.e", "V_1.2-3", None)),
        (f"ghcr.io/a/b@{DIGEST}", Reference("ghcr.io/a/b", None, DIGEST)),
        (f"a/b:c@{DIGEST}", Reference("a/b", "c", DIGEST)),
    ],
)
def test_what_engines_name_images_is_a_reference(text: str, found: Reference) -> None:
    assert Reference.parse(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "errata/../debian",
        "errata/..",
        "../debian",
        "errata/./base",
        "errata//base",
        "/errata/base",
        "errata/base/",
        "errata/base:",
        "errata/base:..",
        "errata/base:a/b",
        "errata/base@sha256:" + "a" * 63,
        "errata/base@sha512:" + "a" * 128,
        "errata/base\n",
        "errata/base\0",
        "errata/base:v\n",
        "errata/ba%2e%2e",
        "errata/base?all=1",
        "errata/base#x",
        "errata/bas\u0435",  # CYRILLIC SMALL LETTER IE
        "errata/base:\u0661",  # ARABIC-INDIC DIGIT ONE
        "errata\uff0fbase",  # FULLWIDTH SOLIDUS
        "errata/\u2025/base",  # TWO DOT LEADER
        "errata/Base",
        "a" * 64,
        "sha256:" + "a" * 64,
        "errata/" + "a" * 300,
        "errata/base:" + "a" * 129,
        "a" * 100_000,
        "a/" * 50_000 + "a",
        "a-" * 50_000,
    ],
)
def test_what_could_be_a_path_or_an_id_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a reference"):
        Reference.parse(text)


@pytest.mark.parametrize("text", ["", ".", ".."])
def test_no_part_of_an_address_leads_elsewhere(text: str) -> None:
    with pytest.raises(ValueError, match="part of an address"):
        segment(text)


def test_parts_of_an_address_are_encoded() -> None:
    assert segment("a/../b:c?d#e%2f") == "a%2F..%2Fb%3Ac%3Fd%23e%252f"


@pytest.mark.parametrize("name", ["errata/../secret", "errata/../secret:latest", "errata/../../containers/json"])
def test_a_traversal_does_not_reach_the_engine(attacker: Attacker, engine: FakeEngine, name: str) -> None:
    engine.add_image("secret:latest")
    assert attacker.code("create", image=name) == "invalid"
    assert engine.asked == []


def test_an_image_has_to_carry_the_name_that_was_asked_for(attacker: Attacker, engine: FakeEngine) -> None:
    made = engine.add_image("errata/base:default")
    assert attacker.ok("create", image="errata/base:default")["image"] == made
    # What an engine completes or resolves otherwise, such as one with a registry's mirror.
    engine.find_image = lambda name: engine.images[0]  # type: ignore[method-assign]
    for name in ("errata/other:default", "errata/base:other", "errata/base", f"errata/base@{DIGEST}"):
        assert attacker.code("create", image=name) == "image_missing", name


def test_a_digest_counts_with_its_tag_only(attacker: Attacker, engine: FakeEngine) -> None:
    made = engine.add_image("errata/base:default", digests=(f"errata/base@{DIGEST}",))
    engine.find_image = lambda name: engine.images[0]  # type: ignore[method-assign]
    assert attacker.ok("create", image=f"errata/base@{DIGEST}")["image"] == made
    assert attacker.ok("create", image=f"errata/base:default@{DIGEST}")["image"] == made
    assert attacker.code("create", image=f"errata/base:other@{DIGEST}") == "image_missing"


def test_a_beginning_of_an_id_names_nothing(
    attacker: Attacker, engine: FakeEngine, serve: object, place: object
) -> None:
    serve("any", images=("*",))  # type: ignore[operator]
    made = engine.add_image("errata/base:default").removeprefix("sha256:")
    everything = Attacker(place / "any")  # type: ignore[operator]
    for length in range(1, 65):
        assert everything.code("create", image=made[:length]) in ("image_missing", "invalid")
    assert len(engine.containers) == 0


def test_what_is_another_owners_answers_as_what_is_not_there(
    attacker: Attacker, neighbour: Attacker, engine: FakeEngine
) -> None:
    theirs = neighbour.ok("commit", container=engine.add_container("two"), facts={})["image"]
    foreign = engine.add_image("secret:latest")
    absent = "sha256:" + "0" * 64
    answers = [attacker.call("create", image=image)["error"] for image in (theirs, foreign, absent)]
    assert [answer["code"] for answer in answers] == ["image_missing"] * 3
    texts = {
        answer["message"].replace(image, "X") for answer, image in zip(answers, (theirs, foreign, absent), strict=True)
    }
    assert len(texts) == 1, texts
