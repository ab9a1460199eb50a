"""Runs a task's ``verify.py`` in a sandbox: a program by itself, which reads a nonce and prints the score with it."""

import json
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Print ``{"nonce": ..., "score": ...}``."""
    nonce = sys.stdin.readline().strip()
    verifier = runpy.run_path(str(Path(__file__).with_name("verify.py")))
    print(json.dumps({"nonce": nonce, "score": verifier["score"]()}))


if __name__ == "__main__":
    main()
