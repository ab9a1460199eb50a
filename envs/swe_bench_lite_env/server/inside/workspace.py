"""Runs inside a fork before any code of the agent: puts files in place, clears caches, and reports which test files
exist.

Standard input is one JSON object:

    nonce     repeated in the answer
    root      of the repository
    files     by path relative to root: null (nothing may be there), or what ``read`` gives for it
    read      paths to return: {"link": target}, or {"content": base64, "mode": bits}; what is not there is left out
    clear     directories to empty
    home      directory to make
    survey    expressions by kind of file, for paths relative to root; ``modules``, names of importable modules;
              ``helpers``, paths of modules without suffix, below any of the directories ``roots``; and ``most`` and
              ``most_bytes``: the number and the length of the paths that the answer may have

The answer is one line with ``nonce``, ``refused`` (paths that could not be put in place), ``read`` and ``survey``:
kind and digest by path, or ``excess``, why there is no survey. Works with Python 3.6.
"""

import base64
import hashlib
import json
import os
import re
import stat
import sys

CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".hypothesis"}
NO_WALK = {".git", ".hg", ".svn"}
LARGEST = 32 * 1024 * 1024


def main():
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    root = request["root"]
    allow(root)
    for directory in request.get("clear", ()):
        empty(directory)
    if request.get("home"):
        os.makedirs(request["home"], 0o700, exist_ok=True)
    drop_caches(root)
    refused = []
    for name, content in request.get("files", {}).items():
        try:
            put(root, name, content)
        except OSError as error:
            refused.append("%s: %s" % (name, error.strerror))
    contents = [(name, read(os.path.join(root, name))) for name in request.get("read", ())]
    answer = {
        "nonce": request["nonce"],
        "refused": refused,
        "read": {name: content for name, content in contents if content is not None},
    }
    try:
        if "survey" in request:
            answer["survey"] = survey(root, request["survey"])
    except TooMany as error:
        answer["excess"] = str(error)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


class TooMany(Exception):
    """The survey would have more files than it may."""


class Survey(dict):
    """Kind and digest by path, up to the bounds of a survey."""

    def __init__(self, rules):
        super().__init__()
        self.rules = rules
        self.size = 0

    def __setitem__(self, path, entry):
        super().__setitem__(path, entry)
        self.size += len(path)
        if len(self) > self.rules["most"]:
            raise TooMany("more than %d files are tests, or of a test runner" % self.rules["most"])
        if self.size > self.rules["most_bytes"]:
            raise TooMany(
                "the names of tests, and of a test runner's files, exceed %d bytes" % self.rules["most_bytes"]
            )


def allow(directory):
    """Let the owner use a directory, whatever its mode was."""
    mode = stat.S_IMODE(os.lstat(directory).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(directory, mode | 0o700)


def walk(top):
    """As os.walk, which calls itself for each level before Python 3.12: a tree of any depth is walked here."""
    waiting = [top]
    while waiting:
        here = waiting.pop()
        directories, files = [], []
        try:
            for name in os.listdir(here):
                (directories if os.path.isdir(os.path.join(here, name)) else files).append(name)
        except OSError:
            continue
        yield here, directories, files
        inside = [os.path.join(here, name) for name in directories]
        waiting.extend(path for path in reversed(inside) if not os.path.islink(path))


def remove(path):
    """Remove a file or a tree of any depth.

    It goes from directory to directory, so no call is nested and no path is too long. It renames nothing: in a fork the
    tree is in a lower layer of an overlay, where directories cannot be renamed.
    """
    if not os.path.isdir(path) or os.path.islink(path):
        if os.path.lexists(path):
            os.unlink(path)
        return
    start = os.open(".", os.O_RDONLY)
    try:
        os.chdir(os.path.dirname(path) or ".")
        names, waiting = [], [[os.path.basename(path)]]  # of the directories that were entered; to enter at each level
        while waiting:
            if waiting[-1]:
                name = waiting[-1].pop()
                allow(name)
                os.chdir(name)
                names.append(name)
                inside = os.listdir(".")
                directories = [one for one in inside if os.path.isdir(one) and not os.path.islink(one)]
                for one in set(inside).difference(directories):
                    os.unlink(one)
                waiting.append(directories)
            else:
                waiting.pop()
                if names:
                    os.chdir("..")
                    os.rmdir(names.pop())
    finally:
        os.fchdir(start)
        os.close(start)


def empty(directory):
    """Remove the contents of a directory, except those that this user may not remove; the directory stays."""
    try:
        allow(directory)
    except OSError:
        pass  # not the agent's
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            remove(os.path.join(directory, name))
        except OSError:
            continue  # not the agent's


def put(root, name, content):
    """Make a file what it has to be; what stands in the way of its directories goes."""
    here = root
    parts = name.split("/")
    for part in parts[:-1]:
        here = os.path.join(here, part)
        if os.path.islink(here) or (os.path.lexists(here) and not os.path.isdir(here)):
            os.unlink(here)
        if not os.path.lexists(here):
            if content is None:
                return
            os.mkdir(here, 0o755)
        allow(here)
    path = os.path.join(here, parts[-1])
    remove(path)
    if content is None:
        return
    if "link" in content:
        os.symlink(content["link"], path)
        return
    with open(path, "wb") as file:
        file.write(base64.b64decode(content["content"]))
    os.chmod(path, content["mode"])


def read(path):
    try:
        if os.path.islink(path):
            return {"link": os.readlink(path)}
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            return None
        with open(path, "rb") as file:
            content = base64.b64encode(file.read()).decode("ascii")
        return {"content": content, "mode": stat.S_IMODE(status.st_mode) | 0o600}
    except OSError:
        return None


def drop_caches(root):
    """Remove byte code and caches of test runners: what they hold need not be what the sources say."""
    for here, directories, files in walk(root):
        for name in list(directories):
            path = os.path.join(here, name)
            if name in NO_WALK or os.path.islink(path):
                directories.remove(name)
            elif name in CACHES:
                directories.remove(name)
                try:
                    remove(path)
                except OSError:
                    continue
            else:
                try:
                    allow(path)
                except OSError:
                    continue
        there = set(files)
        for name in files:
            # Beside its source byte code is stale; alone it is a module of its own.
            if name.endswith((".pyc", ".pyo")) and name[:-1] in there:
                try:
                    os.unlink(os.path.join(here, name))
                except OSError:
                    continue


def survey(root, rules):
    kinds = [(kind, re.compile(text)) for kind, text in rules["kinds"].items()]
    modules = set(rules["modules"])
    helpers = {top + module for module in rules["helpers"] for top in rules["roots"]}
    found = Survey(rules)
    digests = {}
    for here, directories, files in walk(root):
        inside = os.path.relpath(here, root)
        prefix = "" if inside == "." else inside + "/"
        directories[:] = sorted(name for name in directories if name not in NO_WALK)
        package = "__init__.py" in files
        links = {name for name in directories if os.path.islink(os.path.join(here, name))}
        for name in files + sorted(links):
            path = prefix + name
            linked = name in links
            kind = next((kind for kind, expression in kinds if expression.search(path)), None)
            if kind is None and (linked or name.endswith((".py", ".so", ".pyc"))):
                # A link to a directory stands in front of a module as the directory itself would.
                named = linked and any(kind == "helper" and text.search(path + "/__init__.py") for kind, text in kinds)
                kind = "helper" if named or module(prefix, name) in helpers else None
            if kind is not None:
                found[path] = [kind, digest(os.path.join(here, name), digests)]
            elif not package and name.split(".")[0] in modules and name.endswith((".py", ".so", ".pyc")):
                found[path] = ["module", ""]
        if not package:
            for name in directories:
                if name in modules and prefix + name not in found:
                    found[prefix + name] = ["module", ""]
    return found


def module(prefix, name):
    """Return the path of a module without its suffix, and of a package without its __init__."""
    stem = name.split(".", 1)[0]
    return prefix.rstrip("/") if stem == "__init__" else prefix + stem


def digest(path, known):
    """Return the digest of a file. ``known`` has those of earlier ones by inode: a file of many names is read once."""
    try:
        if os.path.islink(path):
            return "link " + os.readlink(path)
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            return "no file"
        inode = (status.st_dev, status.st_ino)
        if inode not in known:
            with open(path, "rb") as file:
                known[inode] = hashlib.sha256(file.read()).hexdigest()
        return known[inode]
    except OSError as error:
        return "unreadable: %s" % error.strerror


if __name__ == "__main__":
    main()
