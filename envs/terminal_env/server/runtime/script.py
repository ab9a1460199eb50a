"""Runs a Harbor-style ``/tests/test.sh`` inside the sandbox and prints one line with the verdict.

Standard input: one JSON object with the nonce, the name of the log directory and the time limit. The nonce never
reaches a child: it is read before one exists, is not in an argument or variable, and this process cannot be inspected
by others of its user (PR_SET_DUMPABLE 0).

While ``test.sh`` runs, the programs in ``programs/`` report what it asked of this machine and did not get. A report
counts if its sender descends from ``test.sh`` through processes whose command lines are those of the tests (`trusted`):
a program of the agent that sends one, or calls one of these programs, does not turn a reward of 0 into an error. One
that first replaces its own command line with one of the tests can: see `trusted`. So can code of the agent in the
process of a test: it can call what sends the reports there.
"""

import ctypes
import json
import math
import os
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import time

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
SYSTEM = ("/usr/bin/", "/bin/", "/usr/sbin/", "/sbin/")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELLS = {"bash", "sh", "dash"}
WRAPPERS = {"env", "nice", "setsid", "stdbuf", "tee", "time", "timeout", "xargs"}
OURS = ("/tests/", "/verifier/", "/logs/")
LOGS = "/logs/verifier"  # a symlink to a directory that this program makes
LONG_WITH_VALUE = {"--rcfile", "--init-file", "--check-hash-based-pycs"}
MAX_REPORTS = 50


def of_the_tests(pid, script):
    """Return whether process ``pid`` descends from ``script`` (a pid) through the verifier's own processes only."""
    for _ in range(64):
        if pid == script:
            return True
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            program = os.readlink(f"/proc/{pid}/exe")
        except (OSError, ValueError, IndexError):
            return False
        if not program.startswith(SYSTEM) or not trusted(os.path.basename(program), words):
            return False
        pid = parent
    return False


def trusted(program, words):
    """Return whether the command line of a program of the system can be that of one of the verifier's own processes.

    A wrapper (`WRAPPERS`) always can. A shell or Python can if it runs code from its command line or standard input,
    or a file in one of the directories `OURS`, named by an absolute path and after symlinks. ``python -m`` cannot,
    because the module may be the agent's.

    A command line does not prove where a process came from: a program of the agent that a test starts can ``exec``
    ``bash -c CODE``, or overwrite its arguments in memory, and counts then. It gains an error in place of its reward.

    Args:
        program: File name of the executable, without its directory.
        words: Command line of the process, with its name first.
    """
    shell = program in SHELLS
    if not shell and not program.startswith("python"):
        return program in WRAPPERS
    rest = words[1:]
    while rest and rest[0].startswith(("-", "+") if shell else "-"):
        option, rest = rest[0], rest[1:]
        if option == "--" or (shell and option == "-"):
            break
        if option == "-":
            return True
        if option.startswith("--"):
            rest = rest[option in LONG_WITH_VALUE :]
            continue
        for at, letter in enumerate(option[1:], start=2):
            if letter == "c" or (shell and letter == "s"):
                return True
            if not shell and letter == "m":
                return False
            if shell and letter in "oO":  # its value is the next word
                rest = rest[1:]
            elif not shell and letter in "WX":  # its value is the rest of this word, or the next one
                rest = rest[at == len(option) :]
                break
    ours = (*OURS, f"{os.path.realpath(LOGS)}/")
    return not rest or (rest[0].startswith("/") and os.path.realpath(rest[0]).startswith(ours))


class Reports:
    """Takes reports while a process runs."""

    def __init__(self, path):
        self.taken = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(path)
        self.socket.listen(16)
        self.socket.settimeout(5)

    def wait(self, process, timeout_s):
        """Read reports until ``process`` has ended; return its exit code, or None at the time limit."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            ended = os.pidfd_open(process.pid)
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            try:
                while (left := deadline - time.monotonic()) > 0:
                    ready = [key.fileobj for key, _ in selector.select(left)]
                    if self.socket in ready:
                        self.take(process.pid)
                    elif ended in ready:
                        return process.wait()
                return None
            finally:
                os.close(ended)

    def take(self, script):
        try:
            connection, _ = self.socket.accept()
            with connection:
                connection.settimeout(2)
                raw = b""
                while (data := connection.recv(4096)) and len(raw) < 65536:
                    raw += data
                pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                report = json.loads(raw)
                kind, name, text = (str(report[key]) for key in ("kind", "name", "text"))
                if of_the_tests(pid, script) and len(self.taken) < MAX_REPORTS:
                    on_machine = shutil.which(name, path=SYSTEM_PATH) is not None
                    entry = {"kind": kind, "name": name, "text": text, "on_machine": on_machine}
                    if entry not in self.taken:
                        self.taken.append(entry)
                connection.sendall(b".")
        except (OSError, ValueError, KeyError, TypeError):
            return


def reward(logs):
    """Return the number in the reward file, and what was found instead of one.

    As in Harbor, reward.txt decides where both files have something. What was found is None without a reward file, and
    "" for files that are empty or not regular: then whatever was to write a number did not.
    """
    found = None
    for name in ("reward.txt", "reward.json"):
        try:
            fd = os.open(os.path.join(logs, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                raw = file.read(65536).strip()
        except FileNotFoundError:
            continue
        except OSError:  # a symbolic link, a directory
            raw = b""
        if not raw:
            found = ""
            continue
        try:
            value = json.loads(raw) if name.endswith(".json") else printed_number(raw.decode())
            value = value["reward"] if isinstance(value, dict) else value
            if type(value) in (int, float) and math.isfinite(float(value)):
                return float(value), None
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            pass
        return None, f"{name} says {raw[:200].decode('utf-8', 'replace')!a}"
    return None, found


def printed_number(text):
    """Return a number as programs print it, also ``.5`` and ``1.``; not ``1_0``, which Python takes too."""
    if "_" in text:
        raise ValueError(text)
    return float(text)


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
    logs = os.path.realpath(LOGS)
    home = request["home"]
    os.makedirs(logs, mode=0o700)
    os.makedirs(f"{home}/.local/bin", mode=0o700)
    with open(f"{home}/.local/bin/env", "w") as file:  # the installer of uv leaves one
        file.write('export PATH="$HOME/.local/bin:$PATH"\n')
    for name in ("uv", "uvx"):
        if os.path.exists(f"/verifier/bin/{name}"):
            os.symlink(f"/verifier/bin/{name}", f"{home}/.local/bin/{name}")
    reports = Reports(f"{home}/.reports")
    env = {"HOME": home, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "TEST_DIR": "/tests"}
    env |= {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    env |= {"ERRATA_VERIFIER_SOCKET": f"{home}/.reports", "BASH_ENV": "/verifier/programs/bash_env"}
    env |= request["env"]
    # The system's programs come before those that the Dockerfile names: the agent could have made these.
    wanted = [place for place in env.get("PATH", "").split(":") if place]
    first = [*request["programs"], *SYSTEM_PATH.split(":")]
    env["PATH"] = ":".join([*first, *(place for place in wanted if place not in first)])
    env["PYTHONPATH"] = ":".join(filter(None, ["/site", env.get("PYTHONPATH", "")]))
    if request["packages"]:
        env["ERRATA_VERIFIER_PACKAGES"] = request["packages"]
    if request["path"] is not None:
        env["PATH"] = request["path"]
    try:
        os.chdir(request["workdir"])
    except OSError:
        os.chdir("/")  # the agent closed its own workspace; test.sh says what that is worth
    # stdout joins stderr: the verdict is the only thing this process prints
    test = subprocess.Popen(
        ["/bin/bash", "/tests/test.sh"], env=env, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
    )
    exit_code = reports.wait(test, request["timeout_s"])
    end_all(time.monotonic() + 10)
    score, found = reward(logs)
    verdict = {"nonce": request["nonce"], "score": score, "found": found, "exit_code": exit_code}
    verdict["lacks"] = reports.taken
    os.write(1, ("\n" + json.dumps(verdict) + "\n").encode())


if __name__ == "__main__":
    main()
