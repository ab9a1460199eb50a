"""The error tree and the wire codes (PROTOCOL D5)."""

from __future__ import annotations

import pytest
from openenv.core.env_server.types import WSErrorCode

from errata_protocol import errors
from errata_protocol.errors import CODES, CallerError, ErrataError, ServiceError, error_from_wire


def _classes(cls: type[ErrataError] = ErrataError) -> list[type[ErrataError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _classes(sub))]


PUBLIC = [
    c for c in _classes() if c.__module__ == errors.__name__ and c not in (ErrataError, CallerError, ServiceError)
]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda c: c.__name__)
def test_each_class_has_a_code_of_its_own_branch_and_stands_in_the_drawing(cls: type[ErrataError]) -> None:
    assert cls.code in CODES
    assert errors.__doc__ is not None and f" {cls.__name__} " in errors.__doc__ + " "
    assert (CODES[cls.code].fault == "caller") is issubclass(cls, CallerError)


def test_upstreams_codes_are_all_known() -> None:
    assert {code.value for code in WSErrorCode} <= set(CODES)


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda c: c.__name__)
def test_a_class_comes_back_from_the_wire(cls: type[ErrataError]) -> None:
    back = error_from_wire({"message": "m", "code": cls.code, "eid": "e"})
    assert back.code == cls.code and back.message == "m" and back.details == {"eid": "e"}
    assert isinstance(back, CallerError) is (CODES[cls.code].fault == "caller")


def test_an_unknown_code_keeps_its_text_and_code() -> None:
    back = error_from_wire({"message": "m", "code": "NEW_THING"})
    assert back.code == "NEW_THING" and str(back) == "m" and isinstance(back, ServiceError)


def test_errors_can_be_caught_as_upstreams_client_raises_them() -> None:
    with pytest.raises(RuntimeError):
        raise error_from_wire({"message": "m", "code": "EXECUTION_ERROR"})


def test_a_message_names_the_next_step() -> None:
    assert "between 0 and 4" in str(errors.StateOutOfRange("ep", 9, 5))
    assert "errata episodes" in str(errors.UnknownEpisode("ep"))
