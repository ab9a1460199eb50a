"""Runs inside a sandbox, after the installation: leaves a repository with one commit and nothing besides.

    finish.py CONFIG SOURCES

CONFIG names a JSON file: ``root`` of the repository, ``time`` in seconds since 1970 for every file and for the commit,
``message`` of the commit, ``heed_ignore`` to leave out what .gitignore names. SOURCES lists the files of the source,
relative, as list_files.py writes them.
"""

import json
import os
import shutil
import stat
import subprocess
import sys

CACHES = {
    *("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs"),
    *(".ipynb_checkpoints", ".cache", ".coverage", "pip-wheel-metadata"),
}
BUILDS = {"build", "dist", "wheelhouse"}
"""Directories at the root that an installation leaves copies of the sources in."""


def main():
    with open(sys.argv[1], encoding="utf-8", errors="surrogateescape") as file:
        config = json.load(file)
    with open(sys.argv[2], encoding="utf-8", errors="surrogateescape") as file:
        sources = set(json.load(file))
    root = config["root"]
    for name in (".git", ".hg", ".svn", ".bzr"):
        remove(os.path.join(root, name))
    clean(root, sources)
    commit(root, sources, config)
    settle(root, config["time"])


def clean(root, sources):
    """Remove caches, byte code and build directories, but for what the source itself has."""
    directories = {""}
    for name in sources:
        while name:
            name = os.path.dirname(name)
            directories.add(name)
    for here, subdirectories, files in os.walk(root, topdown=True):
        inside = os.path.relpath(here, root)
        prefix = "" if inside == "." else inside + "/"
        for name in list(subdirectories):
            stale = name in CACHES or (not prefix and name in BUILDS)
            if stale and prefix + name not in directories:
                remove(os.path.join(here, name))
                subdirectories.remove(name)
        for name in files:
            stale = prefix + name not in sources and (name in CACHES or name.endswith((".pyc", ".pyo")))
            if stale or name == ".git":  # in a file, it is a submodule's link to a repository that is not here
                os.unlink(os.path.join(here, name))


def commit(root, sources, config):
    moment = f"{config['time']} +0000"
    who = {"NAME": "Errata", "EMAIL": "errata@localhost", "DATE": moment}
    environment = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    environment.update(PATH=os.environ["PATH"], HOME="/nonexistent", LC_ALL="C.UTF-8", GIT_CONFIG_NOSYSTEM="1")

    def git(*arguments, given=b""):
        command = ["git", "-C", root, "-c", "core.logAllRefUpdates=false", "-c", "gc.auto=0", "-c", "safe.directory=*"]
        subprocess.run([*command, *arguments], check=True, input=given, env=environment, stdout=subprocess.DEVNULL)

    git("init", "--quiet", "--initial-branch=main", "--template=")
    # Times and sizes are what a copy of the repository keeps; with the rest git would read every file anew.
    for name, value in (("core.trustctime", "false"), ("core.checkStat", "minimal"), ("core.autocrlf", "false")):
        git("config", name, value)
    settle(root, config["time"])  # before the index notes the times
    there = sorted(name for name in sources if os.path.lexists(os.path.join(root, name)))
    names = b"".join(os.fsencode(name) + b"\0" for name in there)
    if config.get("heed_ignore"):  # files that were built lie among those of the source
        git("add", "--all")
    elif there:
        git("add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul", given=names)
    git("-c", "commit.gpgSign=false", "commit", "--quiet", "--allow-empty", "--no-verify", "-m", config["message"])
    git("-c", "pack.threads=1", "repack", "-a", "-d", "-q", "-n")
    git("prune-packed", "-q")
    left = others(root, environment)
    if left:
        os.makedirs(os.path.join(root, ".git/info"), exist_ok=True)
        with open(os.path.join(root, ".git/info/exclude"), "wb") as file:
            file.write(b"# made by the installation\n" + b"".join(b"/" + pattern(name) + b"\n" for name in left))
    for name in ("logs", "hooks", "branches", "COMMIT_EDITMSG", "description", "FETCH_HEAD", "ORIG_HEAD"):
        remove(os.path.join(root, ".git", name))


def others(root, environment):
    """Return what is neither committed nor ignored, as git lists it: made by the installation."""
    command = ["git", "-C", root, "-c", "safe.directory=*", "ls-files", "-z", "--others", "--exclude-standard"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return [name for name in done.stdout.split(b"\0") if name]


def pattern(name):
    """Return a name as .gitignore reads it."""
    for sign in (b"\\", b"*", b"?", b"["):
        name = name.replace(sign, b"\\" + sign)
    return name[:-1] + b"\\ " if name.endswith(b" ") else name


def settle(root, moment):
    """Give everything one time, and modes that depend on the executable bit only."""
    for here, subdirectories, files in os.walk(root, topdown=False):
        for name in [*subdirectories, *files]:
            path = os.path.join(here, name)
            status = os.lstat(path)
            if not stat.S_ISLNK(status.st_mode):
                executable = stat.S_ISDIR(status.st_mode) or status.st_mode & 0o100
                os.chmod(path, 0o755 if executable else 0o644)
            os.utime(path, (moment, moment), follow_symlinks=False)
    os.utime(root, (moment, moment))
    index = os.path.join(root, ".git/index")
    if os.path.exists(index):
        os.utime(index, (moment + 1, moment + 1))  # newer than what it lists: else git reads every file again
        os.utime(os.path.dirname(index), (moment, moment))


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


main()
