"""A file that no runner can collect."""

import no_such_module_anywhere


def test_passes():
    no_such_module_anywhere.call()
