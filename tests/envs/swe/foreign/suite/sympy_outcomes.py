"""Outcomes in the form of sympy's own runner."""

from sympy.testing.pytest import SKIP, XFAIL, slow


def test_passes():
    pass


def test_fails():
    assert 1 == 2


def test_errs():
    raise RuntimeError("no")


def test_prints():
    print("test_fails ok")


@XFAIL
def test_fails_as_expected():
    assert 0


@XFAIL
def test_passes_unexpectedly():
    pass


@SKIP("a reason")
def test_skipped():
    pass


@slow
def test_slow():
    pass
