"""Runs sympy's own test runner, as bin/test does, on a file outside of sympy."""

import sys

from sympy.testing.runtests import PyTestReporter, SymPyTests

tests = SymPyTests(PyTestReporter(True, "short", False), "", False, 1)
tests._testfiles = sys.argv[1:]
sys.exit(not tests.test(sort=False))
