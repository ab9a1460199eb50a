"""Training in processes of its own: two ranks under torchrun, or one process."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.hangs import HANGS_S

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--rdzv_backend=c10d")
HERE = ("--rdzv_endpoint=127.0.0.1:0", "--local_addr=127.0.0.1")


def alone(*command: str | os.PathLike[str]) -> None:
    """Run a program of ours in one process."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}  # also where the machine's own name leads nowhere
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr[-3000:]


def together(*command: str | os.PathLike[str]) -> None:
    """Run it as two ranks."""
    alone(*TORCHRUN, *HERE, *command)
