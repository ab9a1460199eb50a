"""Runs a task's ``verify.py`` inside the sandbox and prints one line with the verdict.

Standard input: one JSON object with the nonce, the results of the probes and, where it is not ``/workspace``, the work
directory. The verdict goes to the standard output this process was started with; whatever ``verify.py`` prints goes to
standard error.
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


class Outcomes:
    """Calls each function of verify.py once, and keeps the outcomes."""

    def __init__(self, needs):
        self._needs = needs
        self._why_not = {}

    def why_not(self, function):
        """Return why ``function`` does not pass, or an empty text when it does.

        Only exceptions that the agent's files can cause count as not passed; others are raised.
        """
        if function not in self._why_not:
            failure = self._call(function)  # also where a need fails, so that a defect of verify.py shows on any state
            self._why_not[function] = self._missing(function) or failure
        return self._why_not[function]

    def _missing(self, function):
        for needed in self._needs.get(function, ()):
            if why := self.why_not(needed):
                return f"{function.__name__} needs {why}"[:500]
        return ""

    def _call(self, function):
        try:
            function()
        except (AssertionError, OSError, ValueError, LookupError, RecursionError) as error:
            return f"{function.__name__}: {type(error).__name__}: {error}"[:500]
        return ""


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
    errata_verify.WORKSPACE = request.get("workdir", errata_verify.WORKSPACE)
    import verify  # noqa: F401  the task's own: it registers its checks

    if not errata_verify.CHECKS:
        raise RuntimeError("verify.py has no @check")
    outcomes = Outcomes(errata_verify.NEEDS)
    results, earned, total, barred = [], 0.0, 0.0, False  # sum() rounds otherwise, and all checks would not give 1
    for kind, entries in (("require", errata_verify.REQUIRED), ("check", errata_verify.CHECKS)):
        for name, weight, function in entries:
            why = outcomes.why_not(function)
            passed = not why
            results.append({"name": name, "kind": kind, "weight": weight, "passed": passed, "why": why})
            earned += weight if passed else 0.0
            total += weight
            barred |= kind == "require" and not passed
    verdict = {"nonce": request["nonce"], "score": 0.0 if barred else earned / total, "checks": results}
    os.write(out, ("\n" + json.dumps(verdict) + "\n").encode())


if __name__ == "__main__":
    main()
