"""Runs a task's ``verify.py`` inside the sandbox and prints one line with the verdict.

Standard input: one JSON object with the nonce and the results of the probes. The verdict goes to the standard output
this process was started with; whatever ``verify.py`` prints goes to standard error.
"""

import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SYSTEM = ("/usr/bin/", "/bin/", "/usr/lib/", "/lib/")


def guard(event, arguments):
    """Refuse to start a program that the agent could have written: those belong into a probe."""
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        program = os.fsdecode(arguments[0] or "")
        if not os.path.realpath(program).startswith(SYSTEM):
            raise PermissionError(f"{program}: verify.py starts programs of the system only, by absolute path")
    elif event in ("os.system", "pty.spawn", "os.fork", "os.forkpty"):
        raise PermissionError(f"{event}: not in verify.py")


def passes(name, function):
    """Return (passed, why not). Only what an odd file of the agent can raise counts as not passed."""
    try:
        function()
    except (AssertionError, OSError, ValueError, LookupError, RecursionError) as error:
        return False, f"{name}: {type(error).__name__}: {error}"[:500]
    return True, ""


def main():
    request = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(out, False)
    sys.path.insert(0, HERE)
    sys.dont_write_bytecode = True
    sys.addaudithook(guard)
    import errata_verify

    errata_verify.PROBES.update(request["probes"])
    import verify  # noqa: F401  the task's own: it registers its checks

    if not errata_verify.CHECKS:
        raise RuntimeError("verify.py has no @check")
    total = sum(weight for _, weight, _ in errata_verify.CHECKS)
    results, earned, barred = [], 0.0, False
    for kind, entries in (("require", errata_verify.REQUIRED), ("check", errata_verify.CHECKS)):
        for name, weight, function in entries:
            passed, why = passes(name, function)
            results.append({"name": name, "kind": kind, "weight": weight, "passed": passed, "why": why})
            earned += weight if passed else 0.0
            barred |= kind == "require" and not passed
    verdict = {"nonce": request["nonce"], "score": 0.0 if barred else earned / total, "checks": results}
    os.write(out, ("\n" + json.dumps(verdict) + "\n").encode())


if __name__ == "__main__":
    main()
