"""`HANGS_S`: after how long a process that a test started counts as one that hangs.

It only ends what would never end, below the timeout of a test, so that the test fails with what the process printed. A
busy machine makes an import that takes a second take a minute.
"""

from __future__ import annotations

HANGS_S = 500.0
