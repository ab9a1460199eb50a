"""Reports to `script.py` the tools and modules that the verifier asked for and this machine lacks.

Nobody may take such a failure for the agent's: the reward file that ``test.sh`` then writes says nothing. Whether a
report counts is decided by its receiver, which sees what process sent it.
"""

import json
import os
import socket

SOCKET = "ERRATA_VERIFIER_SOCKET"


def report(kind, name, text):
    """Send one report and wait until it was read; without a receiver it is dropped.

    Args:
        kind: ``tool`` (a program or package that the machine does not have), ``command`` (a program of that name),
            ``module`` (a Python module of that name) or ``runner`` (a test runner that failed by itself).
        name: What is missing.
        text: One line for the author of the task.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(os.environ[SOCKET])
            connection.sendall(json.dumps({"kind": kind, "name": name[:200], "text": text[:500]}).encode())
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
    except (OSError, KeyError):
        return
