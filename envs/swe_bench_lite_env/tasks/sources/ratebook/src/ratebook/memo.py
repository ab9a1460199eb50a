"""Remembers what methods returned."""

import functools


def memoized(method):
    """Compute the value of a method once for each combination of arguments."""
    known = {}

    @functools.wraps(method)
    def call(self, *arguments):
        if arguments not in known:
            known[arguments] = method(self, *arguments)
        return known[arguments]

    call.known = known
    return call
