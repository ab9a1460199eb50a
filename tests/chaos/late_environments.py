"""A server that serves this does not start until the file that ``ERRATA_TEST_GATE`` names exists."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .environments import TaggedCounter

__all__ = ["TaggedCounter"]

while not Path(os.environ["ERRATA_TEST_GATE"]).exists():
    time.sleep(0.05)
