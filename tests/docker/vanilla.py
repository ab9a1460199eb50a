"""Unmodified clients of both generations of OpenEnv against a published port."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.hangs import HANGS_S
from tests.interop.conftest import FOREIGN, GENERATIONS, foreign_environment, foreign_python

__all__ = ["GENERATIONS", "played"]


def played(generation: str, token: str, port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a generation's clients saw of the terminal environment and of swe_bench_lite.

    They know no token, so it is in the address: websockets makes a header of it.
    """
    address = f"http://any:{token}@127.0.0.1:{port}"
    jobs = [("terminal", f"{address}/terminal"), ("swe_bench_lite", f"{address}/swe_bench_lite")]
    done = subprocess.run(
        [foreign_python(generation), str(FOREIGN / "drive.py"), json.dumps(jobs)],
        cwd=FOREIGN,
        env=foreign_environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    terminal, swe = json.loads(done.stdout.splitlines()[-1])["records"]
    assert "raised" not in terminal and "raised" not in swe, (terminal, swe)
    return terminal, swe
