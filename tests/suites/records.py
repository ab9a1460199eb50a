"""What `.ci/run` keeps from one run to the next, outside the checkout: keys that passed, and tests that were flaky."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from .keys import CACHE, KEY_LENGTH

PLACE = CACHE / "ci"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A suite that passed.

    Args:
        suite: Name of the suite.
        key: Key that the suite passed with.
        date: Day and time, in UTC.
        commit: The commit that was checked out.
        passed: Number of tests that passed.
        seconds: Time that the suite took.
    """

    suite: str
    key: str
    date: str
    commit: str
    passed: int
    seconds: int


@dataclass(frozen=True, kw_only=True)
class Flaky:
    """A test that failed, and passed when it was run again alone.

    Args:
        test: Node id of the test.
        date: Day and time, in UTC.
        commit: The commit that was checked out.
    """

    test: str
    date: str
    commit: str


class Records:
    """The records in a directory.

    Args:
        place: The directory; it is made when something is written.
    """

    def __init__(self, place: Path = PLACE) -> None:
        self._passes = place / "passed"
        self.flaky_file = place / "flaky.json"

    def passed(self, suite: str, key: str) -> Pass | None:
        """Return the record of a suite that passed with a key; None if there is none that can be read whole."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            file = self._passes / f"{suite}-{key}.json"
            record = Pass(**json.loads(file.read_text(encoding="utf-8")))
            if (record.suite, record.key) == (suite, key) and record.date:
                os.utime(file)  # of several branches, the one that is tested keeps its record
                return record
        return None

    def last_pass(self, suite: str) -> tuple[float, float]:
        """Return when a record of a suite was last written or used, in seconds since 1970, and how many seconds that
        run took; 0 and infinity if there is no record that can be read whole."""
        files = self._passes.glob(f"{suite}-{'?' * KEY_LENGTH}.json")
        newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
        with contextlib.suppress(OSError, ValueError, TypeError):
            if newest is not None:
                took = Pass(**json.loads(newest.read_text(encoding="utf-8"))).seconds
                return newest.stat().st_mtime, took
        return 0.0, math.inf

    def keep(self, record: Pass) -> None:
        """Write the record of a pass, and remove older ones of the suite beyond ten."""
        _write(self._passes / f"{record.suite}-{record.key}.json", asdict(record))
        files = self._passes.glob(f"{record.suite}-{'?' * KEY_LENGTH}.json")
        for old in sorted(files, key=lambda file: file.stat().st_mtime)[:-10]:
            old.unlink(missing_ok=True)

    def flaky(self) -> list[Flaky]:
        """Return the tests that were flaky before.

        Raises:
            ValueError: The file cannot be read; the message names it.
        """
        try:
            return [Flaky(**one) for one in json.loads(self.flaky_file.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.flaky_file} cannot be read ({error}): mend or remove it") from error

    def add_flaky(self, found: list[Flaky]) -> None:
        """Add tests that were flaky in this run."""
        if found:
            _write(self.flaky_file, [asdict(one) for one in (*self.flaky(), *found)])


def _write(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
        json.dump(content, new, indent=1)
    Path(new.name).replace(file)
