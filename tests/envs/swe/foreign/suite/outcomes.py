"""Tests of every outcome, for runners of every version: only the oldest syntax."""

import sys
import unittest

import pytest


def test_passes():
    pass


def test_fails():
    assert 1 == 2, "one - two"


def test_prints_a_summary():
    print("PASSED outcomes.py::test_fails")
    print("test_fails PASSED")
    sys.stderr.write("FAILED outcomes.py::test_passes - not so\n")


@pytest.fixture
def broken():
    raise RuntimeError("set-up - fails")


def test_set_up_fails(broken):
    pass


@pytest.fixture
def falls_down():
    yield
    raise RuntimeError("tear-down fails")


def test_tear_down_fails(falls_down):
    pass


@pytest.mark.skip(reason="a - reason")
def test_skipped():
    pass


@pytest.mark.xfail(reason="known")
def test_fails_as_expected():
    raise ValueError


@pytest.mark.xfail
def test_passes_unexpectedly():
    pass


@pytest.mark.xfail(strict=True)
def test_passes_against_the_rules():
    pass


@pytest.mark.parametrize(
    "value", ["a b", "x - y", "[", "a[0]", "/root/a/b.py", "//x/y", "1 PASSED", "\xe9", "", "\n", "\x1b[1m"]
)
def test_parameters(value):
    assert value != "x - y"


class TestClass:
    def test_method(self):
        pass

    def test_failing_method(self):
        raise KeyError("a\nb - c")


class TestCase(unittest.TestCase):
    def test_case(self):
        """A docstring of a case."""

    def test_sub(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)
