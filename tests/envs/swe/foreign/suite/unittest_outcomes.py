"""Outcomes in unittest's verbose form, which django's runner prints too."""

import logging
import sys
import unittest


class Outcomes(unittest.TestCase):
    def test_passes(self):
        pass

    def test_fails(self):
        self.assertEqual(1, 2)

    def test_errs(self):
        raise RuntimeError("no")

    def test_with_docstring(self):
        """A docstring, with ... dots."""

    def test_fails_with_docstring(self):
        """Another docstring."""
        self.fail("on purpose")

    @unittest.skip("a reason")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_prints(self):
        sys.stderr.write("System check identified no issues (0 silenced)\n")

    def test_prints_more(self):
        sys.stderr.write("Testing against Django installed in '/x' with\nup to 2 processes (0 silenced).\n")

    def test_logs(self):
        logging.getLogger("django.request").error("Internal Server Error: /a/b/")

    def test_prints_ok(self):
        sys.stderr.write("ok this is no state\n")
        self.fail()

    def test_sub(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)


class SetUpFails(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise RuntimeError("no class")

    def test_never_runs(self):
        pass


if __name__ == "__main__":
    unittest.main(verbosity=2)
