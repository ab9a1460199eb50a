"""Reports to `script.py` the tools and modules that the verifier asked for and this machine lacks.

Nobody may take such a failure for the agent's: the reward file that ``test.sh`` then writes says nothing. Whether a
report counts is decided by its receiver, which sees what process sent it. In a process that runs code of the agent and
of the tests, only what the tests' own code misses is reported (`missing`).
"""

import filecmp
import json
import os
import socket
import sys

SOCKET = "ERRATA_VERIFIER_SOCKET"


def report(kind, name, text):
    """Send one report and wait until it was read; without a receiver it is dropped.

    Args:
        kind: Kind of the lack: ``tool`` (a program or package that the machine does not have), ``command`` (a program
            of that name), ``module`` (a Python module of that name) or ``runner`` (a test runner that failed by
            itself).
        name: Name of what is missing.
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


def missing(error):
    """Return (kind, name, text) for `report` if ``error`` says that code of the tests missed a module or program.

    Code of the agent may run in the same process. What that code misses is the agent's failure.

    Args:
        error: An exception, with its traceback.
    """
    place, inner = last_frames(error.__traceback__)
    if not of_the_tests(place):
        return None
    if isinstance(error, ModuleNotFoundError) and error.name:
        return "module", error.name.partition(".")[0], f"no Python module {error.name!r}"
    if isinstance(error, FileNotFoundError) and inner == "_execute_child":  # of the module subprocess
        name = error.filename
        if isinstance(name, str) and "/" not in name:
            return "command", name, f"no program {name!r}"
    return None


def of_the_tests(file):
    """Return whether ``file`` is one of the tests, or a copy of one: ``test.sh`` may copy them into the project."""
    file = os.path.normpath(file)
    if file.startswith("/tests/"):
        return True
    name = os.path.basename(file)
    try:
        places = [directory for directory, _, names in os.walk("/tests") if name in names]
        return any(filecmp.cmp(file, os.path.join(place, name), shallow=False) for place in places)
    except OSError:
        return False


def of_the_system(file):
    """Return whether ``file`` belongs to the base tree below /usr, and the agent cannot have written it.

    A Dockerfile may give the agent places there: a work directory in /usr/src, links to its files, files with the mode
    666. /usr/local is not left out: the packages of a base tree that was an image are often there.
    """
    if any(not path.startswith("/usr/") or path.startswith("/usr/src/") for path in (file, os.path.realpath(file))):
        return False
    try:
        # Python's own library has the owner that the system's files have here.
        return os.stat(file).st_uid == os.stat(os.__file__).st_uid and not os.access(file, os.W_OK)
    except OSError:
        return False


def last_frames(trace):
    """Return the file of the last frame outside of the system's libraries, and the name of the last function.

    The file is ``/tests/-`` for code from a command line or standard input: only such code of the tests is watched.
    """
    file, name = "", ""
    while trace is not None:
        code, scope = trace.tb_frame.f_code, trace.tb_frame.f_globals
        name, source = code.co_name, code.co_filename
        if source.startswith("<") and scope is sys.modules["__main__"].__dict__:
            source = "/tests/-"
        elif source.startswith("<") and not source.startswith("<frozen "):
            source = str(scope.get("__file__", ""))  # text that a module passed to exec
        if not source.startswith("<frozen ") and not of_the_system(source):
            file = source
        trace = trace.tb_next
    return file, name
