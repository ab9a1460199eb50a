"""Runs a Harbor-style ``/tests/test.sh`` inside the sandbox and prints one line with the verdict.

Standard input: one JSON object with the nonce, the name of the log directory and the time limit. The nonce never
reaches a child: it is read before one exists, is not in an argument or variable, and this process cannot be inspected
by others of its user (PR_SET_DUMPABLE 0).
"""

import ctypes
import json
import os
import subprocess
import sys
import time

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def reward(logs):
    """Return the number in reward.txt or reward.json, or None."""
    for name in ("reward.txt", "reward.json"):
        try:
            fd = os.open(os.path.join(logs, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                raw = file.read(65536).decode("utf-8").strip()
            value = json.loads(raw) if name.endswith(".json") else float(raw)
            return float(value["reward"] if isinstance(value, dict) else value)
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return None


def descendants():
    """Return the pids of all processes below this one."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parents[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
    found, wave = set(), {os.getpid()}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave and pid not in found}
        found |= wave
    return found


def end_all(deadline):
    """Kill what test.sh left behind, so that nothing changes its reward while that is read."""
    while (pids := descendants()) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return


def main():
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    request = json.loads(sys.stdin.buffer.read())
    logs = os.path.realpath("/logs/verifier")
    home = request["home"]
    os.makedirs(logs, mode=0o700)
    os.makedirs(home, mode=0o700)
    env = {"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    env |= {
        "PYTHONPATH": "/site",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    } | request["env"]
    try:
        os.chdir("/workspace")
    except OSError:
        os.chdir("/")  # the agent closed its own workspace; test.sh says what that is worth
    # stdout joins stderr: the verdict is the only thing this process prints
    test = subprocess.Popen(
        ["/bin/bash", "/tests/test.sh"], env=env, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
    )
    try:
        exit_code = test.wait(timeout=request["timeout_s"])
    except subprocess.TimeoutExpired:
        exit_code = None
    end_all(time.monotonic() + 10)
    verdict = {"nonce": request["nonce"], "score": reward(logs), "exit_code": exit_code}
    os.write(1, ("\n" + json.dumps(verdict) + "\n").encode())


if __name__ == "__main__":
    main()
