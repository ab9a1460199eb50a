"""Finds the interpreter that a recipe needs on this machine, and packs it for a base tree.

A base tree has one Python, its distribution's. The repositories of the benchmark need others, 3.6 to 3.13. What is
packed is the prefix without what was installed into it, and the shared libraries that the base tree does not have.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from errata_protocol.errors import EnvironmentFailed, InvalidRequest

VARIABLE = "ERRATA_PYTHONS"
"""More directories to search, separated by colons: a prefix, or a directory of prefixes."""

HOME = "/opt/python"
"""Where the interpreter stands inside."""

ENVIRONMENT = "/opt/env"
"""The virtual environment of the tests, inside."""

FORMAT = 2
"""Raise it whenever the same interpreter would be packed in another way."""

_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")
_LEFT_OUT = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo"),
    "lib2to3_tests",
}
_ASK = """
import json, platform, sys, sysconfig
paths = sysconfig.get_paths()
print(json.dumps({
    "version": platform.python_version(), "name": sys.implementation.name, "executable": sys.executable,
    "prefix": sys.base_prefix, "real": getattr(sys, "_base_executable", None) or sys.executable,
    "trees": [paths["stdlib"], paths["platstdlib"], sysconfig.get_config_var("INCLUDEPY") or paths["include"]],
}))
"""


class InterpreterMissing(InvalidRequest, LookupError):
    """This machine has no interpreter of the version that a recipe asks for; the message says where it was sought."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter of this machine.

    Args:
        version: ``3.9.18``.
        executable: The program.
        prefix: Its installation.
        trees: Directories of its installation that it needs: library, platform's library, headers.
    """

    version: str
    executable: Path
    prefix: Path
    trees: tuple[Path, ...]

    @property
    def minor(self) -> str:
        """``3.9``."""
        return ".".join(self.version.split(".")[:2])

    @property
    def digest(self) -> str:
        """Names this installation: version, place, and the program's size and time."""
        status = self.executable.stat()
        parts = (FORMAT, self.version, str(self.prefix), status.st_size, status.st_mtime_ns)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def find(wanted: str) -> Interpreter:
    """Return the interpreter of a version: the same patch release if there is one, else the newest.

    Args:
        wanted: ``3.9`` or ``3.9.18``.

    Raises:
        InterpreterMissing: There is none.
    """
    minor = ".".join(wanted.split(".")[:2])
    found: dict[Path, Interpreter] = {}
    for path in _candidates(minor):
        interpreter = _ask(path)
        if interpreter is not None and interpreter.minor == minor:
            found.setdefault(interpreter.executable, interpreter)
    if not found:
        raise InterpreterMissing(
            f"no Python {minor} on this machine (looked for python{minor} on PATH, in pyenv's and uv's versions and in "
            f"{VARIABLE}): install it, `pyenv install {minor}` for example, or name its directory in {VARIABLE}"
        )
    ranked = sorted(found.values(), key=lambda one: (one.version == wanted, _order(one.version)), reverse=True)
    return ranked[0]


def available() -> list[str]:
    """Return the minor versions that this machine has, for messages and tests."""
    minors = []
    for minor in range(6, 15):
        try:
            minors.append(find(f"3.{minor}").minor)
        except InterpreterMissing:
            continue
    return minors


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _candidates(minor: str) -> Iterator[Path]:
    name = f"python{minor}"
    roots = [Path(place) for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
    pyenv = shutil.which("pyenv")
    pyenvs = [Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")]
    if pyenv:
        pyenvs.append(Path(pyenv).resolve().parents[1])
    roots += [root / "versions" for root in pyenvs]
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    roots.append(Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python"))
    for root in roots:
        for place in (root / name, root / "bin" / name, *sorted(root.glob(f"*/bin/{name}"))):
            if place.is_file() and os.access(place, os.X_OK):
                yield place
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        place = Path(directory) / name
        if directory and place.is_file() and os.access(place, os.X_OK):
            yield place
    if sys.version_info[:2] == tuple(int(part) for part in minor.split(".")):
        yield Path(sys.executable)


_asked: dict[Path, Interpreter | None] = {}


def _ask(path: Path) -> Interpreter | None:
    """Return the facts that an interpreter prints about itself; None if it does not run, e.g. a pyenv shim."""
    if path not in _asked:
        _asked[path] = _answer(path)
    return _asked[path]


def _answer(path: Path) -> Interpreter | None:
    try:
        done = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if answer["name"] != "cpython":
        return None
    minor, prefix = ".".join(answer["version"].split(".")[:2]), Path(answer["prefix"]).resolve()
    program = prefix / "bin" / f"python{minor}"
    executable = (program if program.is_file() else Path(answer["real"])).resolve()
    trees = tuple(dict.fromkeys(Path(tree).resolve() for tree in answer["trees"] if Path(tree).is_dir()))
    if not executable.is_file() or not trees or not all(tree.is_relative_to(prefix) for tree in trees[:2]):
        return None
    return Interpreter(answer["version"], executable, prefix, trees)


def pack(interpreter: Interpreter, base: Path, work: Path, mtime_s: int) -> Path:
    """Return a tar archive of an interpreter as it stands in a base tree, with byte code.

    Args:
        interpreter: The interpreter.
        base: Root of the base tree that it goes into.
        work: Directory for temporary files.
        mtime_s: Modification time of all files.

    Raises:
        EnvironmentFailed: Its shared libraries cannot be found, or it cannot be copied.
    """
    root = work / "interpreter"
    home = root / HOME.lstrip("/")
    name = f"python{interpreter.minor}"
    try:
        (home / "bin").mkdir(parents=True)
        shutil.copy2(interpreter.executable, home / "bin" / name)
        (home / "bin" / name).chmod(0o755)
        for link in ("python3", "python"):
            (home / "bin" / link).symlink_to(name)
        for tree in interpreter.trees:
            if tree.is_relative_to(interpreter.prefix):
                _copy(tree, home / tree.relative_to(interpreter.prefix), str(interpreter.prefix))
        for library in _missing_libraries(interpreter, base):
            place = root / "usr/lib" / library.name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library.resolve(), place)
            place.chmod(0o644)
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentFailed(f"{interpreter.executable} cannot be copied: {error}") from error
    library = home / "lib" / name
    packages = library / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    # A link to the environment's Python from elsewhere (tox --current-env makes one) knows of no environment: it finds
    # this. The environment's own Python does not read it.
    site_packages = f"{ENVIRONMENT}/lib/{name}/site-packages"
    (packages / "errata_environment.pth").write_text(f"import site; site.addsitedir({site_packages!r})\n", "ascii")
    for path in (root, *root.rglob("*")):
        os.utime(path, (mtime_s, mtime_s), follow_symlinks=False)
    _compile(interpreter, library)
    archive = work / "interpreter.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as opened:
        for path in sorted(root.rglob("*")):
            info = opened.gettarinfo(path, str(path.relative_to(root)))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = mtime_s
            if info.isreg() or info.islnk():
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
                with path.open("rb") as file:
                    opened.addfile(info, file)
            else:
                opened.addfile(info)
    shutil.rmtree(root)
    return archive


def _copy(source: Path, target: Path, prefix: str) -> None:
    """Copy a directory of an installation without caches, tests and packages; the prefix in it becomes `HOME`."""
    for here, subdirectories, files in os.walk(source):
        subdirectories[:] = [name for name in subdirectories if name not in _LEFT_OUT]
        there = target / Path(here).relative_to(source)
        there.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name in files:
            path = Path(here, name)
            if path.suffix in (".pyc", ".pyo", ".a", ".o") or not path.is_file():
                continue
            if path.name.startswith("_sysconfigdata") or path.name in ("Makefile", "_sysconfig_vars.json"):
                text = path.read_text("utf-8", "surrogateescape").replace(prefix, HOME)
                (there / name).write_text(text, "utf-8", "surrogateescape")
            else:
                shutil.copyfile(path, there / name)
            (there / name).chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _missing_libraries(interpreter: Interpreter, base: Path) -> list[Path]:
    """Return the shared libraries that the interpreter and its modules load and the base tree does not have."""
    modules = [path for tree in interpreter.trees for path in sorted(tree.rglob("lib-dynload/*.so"))]
    command = ["ldd", str(interpreter.executable), *map(str, modules)]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    found: dict[str, Path] = {}
    for line in done.stdout.splitlines():
        row = re.match(r"\s*(\S+) => (/\S+) \(0x", line)
        if row:
            found.setdefault(row[1], Path(row[2]))
    return [path for name, path in sorted(found.items()) if not any((base / d / name).exists() for d in _LIBRARIES)]


def _compile(interpreter: Interpreter, library: Path) -> None:
    """Write the byte code of the library, which is read-only in a sandbox.

    It is valid by hash, or for Python 3.6, which has no hashes, by the one time that all files have.
    """
    forms = [] if interpreter.minor == "3.6" else ["--invalidation-mode", "unchecked-hash"]
    command = [
        str(interpreter.executable),
        "-I",
        "-m",
        "compileall",
        "-q",
        "-j",
        str(min(4, os.cpu_count() or 1)),
        *forms,
    ]
    inside = f"{HOME}/lib/{library.name}"
    # lib2to3 has files of Python 2 that do not compile, so the exit status says nothing.
    subprocess.run([*command, "-d", inside, str(library)], capture_output=True, timeout=900, check=False)
