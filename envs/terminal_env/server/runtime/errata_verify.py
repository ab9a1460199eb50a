"""What a task's ``tests/verify.py`` imports: checks, safe reading of the agent's files, results of the probes.

It runs inside the sandbox, on a copy of the agent's final files, with the base tree's Python and nothing else
(``python3 -I -S``). While it runs, no program of the agent runs: files can be hostile, but they do not move. Programs
of the agent run before, as probes, each in a copy of its own, and only their output arrives here.

    from errata_verify import check, require, text

    @require
    def input_is_unchanged(): ...       # a failure makes the score 0

    @check(weight=2)
    def total_is_right():
        assert text("total.txt").strip() == "42"

    @check(needs=[total_is_right])      # worth nothing alone: a program that refuses everything passes it too
    def wrong_input_is_refused(): ...
"""

import hashlib
import json
import math
import os
import stat
import subprocess
import tempfile

WORKSPACE = "/workspace"
MAX_BYTES = 8 * 1024 * 1024

CHECKS = []
"""(name, weight, function) of each check, in the order of verify.py."""
REQUIRED = []
NEEDS = {}
"""What each check needs besides itself, by its function."""
PROBES = {}
"""Results by name: exit_code, stdout, stderr, timed_out, truncated; filled before verify.py is loaded."""


class NotSolved(AssertionError):
    """The agent's files are not what the task asks for. An AssertionError, so ``assert`` does as well."""


def check(weight=1.0, needs=()):
    """Mark a function as a check worth ``weight``. It passes unless it raises.

    Args:
        weight: Its share of the score, a finite number above 0.
        needs: Functions, checks or not, that have to pass as well, with all that they need themselves. Name here what
            an easy wrong answer breaks: a program that refuses everything passes "wrong input is refused", so that
            check needs one of right input.

    Raises:
        ValueError: The weight is 0, negative, infinite or no number.
        TypeError: Something in ``needs`` is no function.
    """
    needs = tuple(needs)
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"the weight of a check is {weight}: give it a finite number above 0")
    for needed in needs:
        if not callable(needed):
            raise TypeError(f"needs has {needed!r}: name functions that stand above the check")

    def mark(function):
        CHECKS.append((function.__name__, float(weight), function))
        NEEDS[function] = needs
        return function

    return mark


def require(function):
    """Mark a function that must pass, or the score is 0 whatever else passes."""
    REQUIRED.append((function.__name__, 0.0, function))
    return function


def probe(name):
    """Return the result of the probe ``name``."""
    return PROBES[name]


def probe_json(name):
    """Return what the probe ``name`` printed, as JSON.

    Raises:
        NotSolved: It failed, or printed something else.
    """
    result = PROBES[name]
    if result["exit_code"] != 0:
        raise NotSolved(f"probe {name}: exit {result['exit_code']}: {result['stderr'][-300:]}")
    try:
        return json.loads(result["stdout"])
    except ValueError as error:
        raise NotSolved(f"probe {name} printed no JSON: {error}") from error


def path(name):
    """Return the absolute path of ``name`` in the workspace, without following links."""
    return os.path.normpath(os.path.join(WORKSPACE, name))


def data(name, max_bytes=MAX_BYTES):
    """Return the bytes of a regular file of the workspace.

    A FIFO or device does not block, and a link that leads out of the workspace is refused: it could otherwise point
    at the expected answer.

    Raises:
        NotSolved: It does not exist, is no regular file, is too large, or is outside of the workspace.
    """
    try:
        fd = os.open(path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise NotSolved(f"{name}: {error.strerror}") from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotSolved(f"{name}: not a regular file")
        where = os.path.realpath(path(name))
        if not where.startswith(WORKSPACE + "/"):
            raise NotSolved(f"{name}: leads out of the workspace")
        if status.st_size > max_bytes:
            raise NotSolved(f"{name}: {status.st_size} bytes, at most {max_bytes}")
        return file.read(max_bytes)


def text(name):
    """Return a file of the workspace as text; bytes that are no UTF-8 fail the check."""
    try:
        return data(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotSolved(f"{name}: {error}") from error


def lines(name):
    """Return the lines of a file of the workspace, without a last empty one."""
    return text(name).splitlines()


def sha256(name):
    """Return the SHA-256 of a file of the workspace, in hex."""
    return hashlib.sha256(data(name)).hexdigest()


def json_file(name):
    """Return the JSON value in a file of the workspace."""
    try:
        return json.loads(text(name))
    except (ValueError, RecursionError) as error:
        raise NotSolved(f"{name}: {error}") from error


def mode(name):
    """Return the permission bits of an entry of the workspace; a link's own entry is refused."""
    try:
        status = os.lstat(path(name))
    except OSError as error:
        raise NotSolved(f"{name}: {error.strerror}") from error
    if stat.S_ISLNK(status.st_mode):
        raise NotSolved(f"{name}: a symbolic link")
    return stat.S_IMODE(status.st_mode)


class GitObjects:
    """Reads commits of the agent's repository without its configuration, hooks or filters.

    References are read as the plain files they are. What a reference leads to is copied into a git directory of our
    own, which computes the name of each object anew. So no commit-graph, index of a pack, graft, replacement or object
    with another object's name says something else than the objects themselves.
    """

    def __init__(self, repository):
        self.git_dir = path(os.path.join(repository, ".git"))
        if os.path.realpath(self.git_dir) != self.git_dir or not os.path.isdir(self.git_dir):
            raise NotSolved(f"{repository}: no git repository")
        self._own = tempfile.mkdtemp(prefix="verify-git-")
        self._git("init", "-q", "--bare", self._own)

    def _git(self, *arguments, given=b"", **theirs):
        """Return what git prints.

        Args:
            arguments: Arguments of git.
            given: Standard input of git.
            theirs: Variables that name files of the agent's repository.
        """
        env = {"PATH": "/usr/bin:/bin", "HOME": self._own, "LC_ALL": "C.UTF-8", "GIT_CONFIG_NOSYSTEM": "1"}
        env |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0"}
        env |= {"GIT_DIR": self._own, "GIT_NO_REPLACE_OBJECTS": "1", **theirs}
        command = ["/usr/bin/git", "-c", "core.commitGraph=false", *arguments]
        try:
            done = subprocess.run(command, env=env, cwd="/", input=given, capture_output=True, timeout=20)
        except subprocess.TimeoutExpired as error:
            raise NotSolved(f"git {arguments[0]}: {error}") from error
        if done.returncode != 0:
            raise NotSolved(f"git {arguments[0]}: {done.stderr.decode('utf-8', 'replace')[-300:]}")
        return done.stdout

    def _copy(self, commit):
        """Copy a commit, its ancestors and their files into our own repository."""
        objects = os.path.join(self.git_dir, "objects")
        options = ["--revs", "--stdout", "--window=0", "-q"]
        pack = self._git("pack-objects", *options, given=commit.encode() + b"\n", GIT_OBJECT_DIRECTORY=objects)
        self._git("index-pack", "--stdin", given=pack)
        self._git("rev-list", "--objects", "--quiet", commit)  # fails where an object had another name than its own

    def ref(self, name):
        """Return the commit id that ``name`` (``HEAD``, ``refs/heads/main``) stands for.

        Raises:
            NotSolved: There is no such reference.
        """
        for _ in range(5):
            value = self._plain(name)
            if value is None:
                value = self._packed(name)
            if not value.startswith("ref: "):
                if len(value) == 40 and all(c in "0123456789abcdef" for c in value):
                    self._copy(value)
                    return value
                raise NotSolved(f"{name}: {value[:60]!r} is no commit id")
            name = value[5:].strip()
        raise NotSolved(f"{name}: too many symbolic references")

    def head_name(self):
        """Return what HEAD points at, e.g. ``refs/heads/main``; a commit id when it is detached."""
        return (self._plain("HEAD") or "").removeprefix("ref: ")

    def _plain(self, name):
        inside = os.path.normpath(os.path.join(self.git_dir, name))
        if not inside.startswith(self.git_dir + "/") or not os.path.isfile(inside):
            return None
        return text(os.path.relpath(inside, WORKSPACE)).strip()

    def _packed(self, name):
        packed = os.path.join(self.git_dir, "packed-refs")
        if os.path.isfile(packed):
            for line in lines(os.path.relpath(packed, WORKSPACE)):
                value, _, found = line.partition(" ")
                if found == name:
                    return value
        raise NotSolved(f"no reference {name}")

    def commits(self, start):
        """Return the ids of ``start`` and all its ancestors, newest first."""
        return self._git("rev-list", "--max-count=10000", start).decode().split()

    def parents(self, commit):
        """Return the ids of a commit's parents."""
        return [line.split()[1] for line in self._commit(commit)[0] if line.startswith("parent ")]

    def message(self, commit):
        """Return a commit's message."""
        return self._commit(commit)[1]

    def _commit(self, commit):
        head, _, message = self._git("cat-file", "commit", commit).decode("utf-8", "replace").partition("\n\n")
        return head.splitlines(), message

    def file(self, commit, name):
        """Return the bytes of the file ``name`` in ``commit``.

        Raises:
            NotSolved: There is no such file.
        """
        return self._git("cat-file", "blob", f"{commit}:{name}")

    def is_staged(self, commit):
        """Return whether the index of the agent's repository has the files of ``commit`` and no others."""
        index = os.path.relpath(os.path.join(self.git_dir, "index"), WORKSPACE)
        copy = os.path.join(self._own, "copied-index")
        with open(copy, "wb") as file:
            file.write(data(index))
        staged = self._git("ls-files", "--stage", "-z", GIT_INDEX_FILE=copy).split(b"\0")
        tree = self._git("ls-tree", "-r", "-z", commit).split(b"\0")
        # MODE ID STAGE TAB NAME, and MODE TYPE ID TAB NAME
        entries = [(*row.partition(b"\t")[0].split(), row.partition(b"\t")[2]) for row in tree[:-1]]
        return staged[:-1] == [b"%s %s 0\t%s" % (mode, blob, name) for mode, _, blob, name in entries]

    def names(self, commit):
        """Return the names of all files in ``commit``."""
        return (
            self._git("ls-tree", "-r", "-z", "--name-only", commit).decode("utf-8", "surrogateescape").split("\0")[:-1]
        )
