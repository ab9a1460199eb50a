"""Drafts the recipe of an instance: from the benchmark's own specification, or from the repository's set-up files.

A draft is a start for the author of the recipe. Its notes name what was guessed; `validate` shows whether it is right.
"""

from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from errata_protocol.errors import InvalidRequest

from ...dataset import Instance
from ...recipes import Recipe, Source
from ...rules.directives import default_command, directives
from . import interpreters
from .index import PackageIndex
from .sources import SourceMissing, repository_in

Specs = Mapping[str, Mapping[str, Mapping[str, Any]]]

_FIRST_USED = (
    ("2023-10", "3.11"),
    ("2022-10", "3.10"),
    ("2021-10", "3.9"),
    ("2020-10", "3.8"),
    ("2019-07", "3.7"),
    ("", "3.6"),
)
"""A Python that projects ran on at a time: the newest that was a year old."""
_TEST_REQUIREMENTS = (
    "tests/requirements/py3.txt",
    "requirements/tests.txt",
    "requirements/dev.txt",
    "requirements-test.txt",
    "requirements_test.txt",
    "test-requirements.txt",
    "requirements-dev.txt",
    "requirements.txt",
)
_NOT_HERE = re.compile(r"\bapt(-get)?\b|\bwget\b|\bcurl\b|\bconda\b|locale|^[A-Z_]+=|QHULL|export L")
_ALLOWED = re.compile(
    r"(?:requires-python|python_requires)\s*=\s*[\"']?([^\"'\n)]+?)[\"']?\s*(?:$|[,)\n])", re.MULTILINE
)
_LISTS = ("install_requires", "requires", "requirements", "install_requirements")
_ASK = """
import json
from swebench.harness import constants as c
print(json.dumps({"specs": c.MAP_REPO_VERSION_TO_SPECS, "files": getattr(c, "MAP_REPO_TO_REQS_PATHS", {})}))
"""


_MAX_PROJECT = 32 * 1024


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe that was guessed.

    Args:
        recipe: The recipe.
        notes: Notes on what the recipe was made of, and on what to check in it.
    """

    recipe: Recipe
    notes: tuple[str, ...]


def specifications(python: Path) -> Specs:
    """Return the specifications of the benchmark by repository and version, from another Python's swebench 4.1.

    Raises:
        InvalidRequest: That Python does not have them: version 5 has none.
    """
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=300, check=True)
        found: Specs = json.loads(done.stdout.splitlines()[-1])["specs"]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise InvalidRequest(
            f"{python} does not give the benchmark's specifications ({said.strip().splitlines()[-1]}): install "
            "swebench==4.1.0 there"
        ) from error
    return found


def draft(instance: Instance, *, mirror: Path | None, index: PackageIndex, specs: Specs | None = None) -> Draft:
    """Return a recipe for an instance.

    Args:
        instance: The instance.
        mirror: Directory of git repositories; without the repository in it, the source is an archive of the index.
        index: Says which releases there were when the issue was fixed.
        specs: Specifications of the benchmark.

    Raises:
        IndexFailed: The package index does not answer.
        SourceMissing: The instance is neither in the mirror nor on the index.
    """
    notes: list[str] = []
    files = _Repository.of(instance, mirror)
    source = _source(instance, files, index, notes)
    spec = (specs or {}).get(instance.repo, {}).get(instance.version)
    if spec is not None:
        notes.append(f"from the benchmark's specification of {instance.repo} {instance.version}")
        return Draft(_from_spec(instance, spec, source, files, index, notes), tuple(notes))
    notes.append("guessed from the set-up files and the date: read it before you use it")
    date = instance.created_at[:10]
    python = _python(files, date, notes)
    names = _requirements(files, notes)
    runner = {"django/django": "django", "sympy/sympy": "sympy"}.get(instance.repo, "pytest")
    wanted = [*(["pytest"] if runner == "pytest" else []), "setuptools", "wheel", *names]
    project = instance.repo.partition("/")[2].lower()
    pins = _pins(wanted, date, python, index, notes, project)
    recipe = Recipe(
        instance_id=instance.instance_id,
        source=source,
        python=python,
        pins=pins,
        install=("python -m pip install -e .",) if files is None or files.is_project else (),
        test_command=_command(default_command(instance), instance, python, pins, notes),
        runner=runner,
    )
    return Draft(recipe, tuple(notes))


class _Repository:
    """Files of a repository at the base commit."""

    def __init__(self, directory: Path, commit: str) -> None:
        self._directory, self._commit = directory, commit

    @classmethod
    def of(cls, instance: Instance, mirror: Path | None) -> _Repository | None:
        if mirror is None or not instance.base_commit:
            return None
        try:
            made = cls(repository_in(mirror, instance.repo), instance.base_commit)
        except SourceMissing:
            return None
        return made if made._git("cat-file", "-e", f"{instance.base_commit}^{{commit}}") is not None else None

    def read(self, path: str) -> str | None:
        """Return a file's text, None where it is not there."""
        return self._git("show", f"{self._commit}:{path}")

    @property
    def is_project(self) -> bool:
        """It can be installed."""
        return any(self.read(name) is not None for name in ("setup.py", "pyproject.toml", "setup.cfg"))

    def _git(self, *arguments: str) -> str | None:
        command = ["git", "--git-dir", str(self._directory), "-c", "safe.directory=*", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        except OSError as error:
            raise InvalidRequest(f"git is needed to read the mirror: {error}") from error
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _source(instance: Instance, files: _Repository | None, index: PackageIndex, notes: list[str]) -> Source:
    if files is not None:
        return Source("git", repo=instance.repo)
    name = instance.repo.partition("/")[2]
    date = instance.created_at[:10]
    found = []
    for link in index.links(name):
        try:
            project, version = parse_sdist_filename(link.filename)
        except ValueError:
            continue
        if project == canonicalize_name(name) and not version.is_prerelease and link.yanked is None:
            found.append((version, link))
    if not found:
        raise SourceMissing(
            f"{instance.instance_id}: {instance.repo} is in no mirror (--mirror DIR) and its name is not on the index"
        )
    before = [pair for pair in found if date and "" < pair[1].uploaded[:10] <= date]
    version, link = max(before or found, key=lambda pair: pair[0])
    notes.append(
        f"the archive of {version} is the last before the fix, and not the base commit: the patches may not apply to it"
    )
    return Source("sdist", name=name, version=str(version), sha256=link.sha256)


def _from_spec(
    instance: Instance,
    spec: Mapping[str, Any],
    source: Source,
    files: _Repository | None,
    index: PackageIndex,
    notes: list[str],
) -> Recipe:
    python = str(spec.get("python", "3.9"))
    if _order(python) < (3, 6):
        notes.append(f"the specification has Python {python}: 3.6 is the oldest that can be prepared")
        python = "3.6"
    python = _nearest(python, interpreters.available(), notes)
    listed = str(spec.get("packages", ""))
    pins: list[str] = []
    if listed.endswith((".txt", ".yml", ".yaml")):
        pins += _named(files, listed, notes)
    else:
        pins += [word for word in re.findall(r"'([^']*)'|\"([^\"]*)\"|(\S+)", listed) for word in word if word]
    date = instance.created_at[:10]
    project = instance.repo.partition("/")[2].lower()
    exact = _pins([*map(str, spec.get("pip_packages", ())), *pins], date, python, index, notes, project)
    before = [str(line) for line in spec.get("pre_install", ())]
    left_out = [line for line in before if _NOT_HERE.search(line) or "$QHULL" in line]
    if left_out:
        notes.append(f"left out, because a build has no network and no root: {'; '.join(left_out)}")
    install = [line for line in before if line not in left_out]
    if spec.get("install"):
        install.append(str(spec["install"]))
    command = spec.get("test_cmd") or ""
    command = command if isinstance(command, str) else command[-1]
    return Recipe(
        instance_id=instance.instance_id,
        source=source,
        python=python,
        pins=exact,
        install=tuple(install),
        test_command=_command(
            " ".join([command, *directives(instance.test_patch, instance.repo)]), instance, python, exact, notes
        ),
        runner={"django/django": "django", "sympy/sympy": "sympy"}.get(instance.repo, "pytest"),
    )


def _python(files: _Repository | None, date: str, notes: list[str]) -> str:
    """Return the Python of the time that the project allows and this machine has, if there is one."""
    wanted = next(version for since, version in _FIRST_USED if date >= since)
    allowed = SpecifierSet()
    for name in ("pyproject.toml", "setup.cfg", "setup.py"):
        text = (files.read(name) if files else None) or ""
        found = re.search(
            r"(?:requires-python|python_requires)\s*=\s*[\"']?([^\"'\n)]+?)[\"']?\s*(?:$|[,)\n])", text, re.M
        )
        if found:
            try:
                allowed = SpecifierSet(found[1].strip())
                break
            except InvalidSpecifier:
                continue
    there = [minor for minor in interpreters.available() if Version(f"{minor}.99") in allowed]
    if not there:
        notes.append(f"no Python of this machine is allowed by the project ({allowed}): install one")
    return _nearest(wanted, there, notes)


def _nearest(wanted: str, there: Sequence[str], notes: list[str]) -> str:
    """Return the Python that is wanted, or the nearest one that is there; of two that are as near, the newer."""
    minor = ".".join(wanted.split(".")[:2])
    if minor in there or not there:
        return wanted
    nearest = min(there, key=lambda one: (abs(_order(one)[1] - _order(wanted)[1]), -_order(one)[1]))
    notes.append(f"Python {nearest} stands for {wanted}, which cannot be used here")
    return nearest


def _command(command: str, instance: Instance, python: str, pins: Sequence[str], notes: list[str]) -> str:
    """Return a test command that can run: of tox only where the pins have it, with the factor of the Python."""
    if not re.match(r"tox\b", command):
        return command
    if {"tox", "tox-current-env"} <= {_name(pin) for pin in pins}:
        return re.sub(r"(-e\s*)py\d+\b", rf"\1py{python.replace('.', '')}", command)
    notes.append("its tests run in pytest: the pins do not have tox and tox-current-env, with which the benchmark runs")
    return " ".join(["pytest -rA", *directives(instance.test_patch, instance.repo)])


def _requirements(files: _Repository | None, notes: list[str]) -> list[str]:
    if files is None:
        notes.append("its dependencies are not pinned, because its set-up files are in no mirror")
        return []
    found: list[str] = []
    text = files.read("pyproject.toml")
    if text:
        try:
            found += _of_project(text)
        except (ValueError, RecursionError):
            notes.append("pyproject.toml cannot be read")
    text = files.read("setup.cfg")
    if text:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(text)
            found += parser.get("options", "install_requires", fallback="").split("\n")
        except configparser.Error:
            notes.append("setup.cfg cannot be read")
    text = files.read("setup.py")
    if text:
        found += _of_setup(text)
    for path in _TEST_REQUIREMENTS:
        text = files.read(path)
        if text is not None:
            notes.append(f"packages for the tests are those of {path}")
            found += text.split("\n")
            break
    return [line.strip() for line in found if line.strip() and not line.strip().startswith(("#", "-"))]


def _of_project(text: str) -> list[str]:
    """Return the dependencies in a pyproject.toml.

    Raises:
        ValueError: It cannot be read.
        RecursionError: It is nested too deeply.
    """
    if len(text) > _MAX_PROJECT:  # tomllib takes time with the square of a dotted key's parts
        raise ValueError("it is too large")
    project = tomllib.loads(text).get("project")
    named = project.get("dependencies") if isinstance(project, dict) else None
    return [item for item in named if isinstance(item, str)] if isinstance(named, list) else []


def _of_setup(text: str) -> list[str]:
    """Return ``install_requires`` of a setup.py where it is written out."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    lists: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        value: ast.expr | None = None
        name = ""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        elif isinstance(node, ast.keyword) and node.arg:
            name, value = node.arg, node.value
        if (
            name.lower() in ("install_requires", "requires", "requirements", "install_requirements")
            and value is not None
        ):
            try:
                read = ast.literal_eval(value)
            except (ValueError, TypeError, MemoryError, RecursionError):
                continue
            lists[name] = [item for item in read if isinstance(item, str)] if isinstance(read, list | tuple) else []
    return next((found for found in lists.values() if found), [])


def _named(files: _Repository | None, listed: str, notes: list[str]) -> list[str]:
    paths = [path for path in _TEST_REQUIREMENTS if path.endswith(listed)] if listed.endswith(".txt") else []
    if files is not None and paths:
        for path in dict.fromkeys([*_TEST_REQUIREMENTS, *paths]):
            text = files.read(path)
            if text is not None:
                notes.append(f"{listed} of the specification is {path}")
                lines = [line.strip() for line in text.split("\n")]
                return [line for line in lines if line and not line.startswith(("#", "-"))]
    notes.append(f"the specification installs {listed} of the repository, which was not read: add its packages to pins")
    return []


def _pins(
    requirements: Iterable[str], date: str, python: str, index: PackageIndex, notes: list[str], project: str
) -> tuple[str, ...]:
    """Return one pin for each package that requirements name, in their order.

    Each is the newest release that all requirements of the package allow and that was on the index at the time. A
    package that the index does not have is left out. Notes say what was not as wished.
    """
    wanted: dict[str, list[Requirement]] = {}
    for text in requirements:
        try:
            found = Requirement(text.split(" #")[0].strip().rstrip("\\").strip())
        except InvalidRequirement:
            notes.append(f"{text!r} is no requirement that pip reads: left out")
            continue
        needed = found.marker is None or found.marker.evaluate({"python_version": python, "extra": ""})
        if needed and canonicalize_name(found.name) != canonicalize_name(project):
            wanted.setdefault(canonicalize_name(found.name), []).append(found)
    pins = []
    for same in wanted.values():
        extras = ",".join(sorted({extra for one in same for extra in one.extras}))
        release = _release(same, date, python, index, notes)
        if release is not None:
            pins.append(f"{same[0].name}{f'[{extras}]' if extras else ''}{release}")
    return tuple(pins)


def _release(same: list[Requirement], date: str, python: str, index: PackageIndex, notes: list[str]) -> str | None:
    """Return the pin for requirements of one package (``==1.0``); None for a package that the index does not have."""
    allowed = [one.specifier for one in same if one.specifier]
    parts = [part for specifier in allowed for part in specifier]
    # An arbitrary version comes first: no text but its own matches it.
    exact = [part for part in parts if part.operator == "==="]
    exact += [part for part in parts if part.operator == "==" and "*" not in part.version]
    both = reduce(and_, allowed, SpecifierSet())
    if exact:
        # What somebody pinned is taken without a look at the index: it may be there without a date.
        taken = next((part for part in exact if all(_allows(other, part.version) for other in parts)), None)
        if taken is None:
            taken = exact[0]
            notes.append(f"{', '.join(map(str, same))}: no release is what all of these ask for: {taken} was taken")
        return str(taken)
    releases = _releases(same[0].name, python, index)
    for specifier in [both, *allowed]:
        fitting = {version: day for version, day in releases.items() if version in specifier}
        at_the_time = [version for version, day in fitting.items() if not (date and day) or day <= date]
        if not fitting:
            continue
        if specifier is not both:
            notes.append(f"{', '.join(map(str, same))}: no release is what all of these ask for: {specifier} was taken")
        if at_the_time:
            return f"=={max(at_the_time)}"
        notes.append(f"{same[0]}: the index has no release of before {date} for Python {python}: the oldest was taken")
        return f"=={min(fitting)}"
    notes.append(f"{same[0]}: the index has no release for Python {python}: left out, so that it is not pinned")
    return None


def _allows(part: Specifier, version: str) -> bool:
    """Return whether a part of a requirement allows an exact version, which may be none of PEP 440's."""
    if part.operator == "===":
        return part.version.lower() == version.lower()
    try:
        return part.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _releases(name: str, python: str, index: PackageIndex) -> dict[Version, str]:
    """Return the releases of a package for a Python, each with the day when it came, empty where the index has none."""
    releases: dict[Version, str] = {}
    links = index.links(name)
    # Of several indexes one may not say when a file came or what it needs: then what the others say counts.
    for link in [link for link in links if link.uploaded] or links:
        try:
            is_wheel = link.filename.endswith(".whl")
            found, version = (
                parse_wheel_filename(link.filename)[:2] if is_wheel else parse_sdist_filename(link.filename)
            )
            if found != canonicalize_name(name):
                continue  # selenium-2.0-dev-9429.tar.gz is no release 9429 of selenium
            fits = not link.requires_python or Version(f"{python}.99") in SpecifierSet(link.requires_python)
        except (ValueError, InvalidVersion, InvalidSpecifier):
            continue
        if fits and link.yanked is None and not version.is_prerelease:
            releases[version] = min(releases.get(version, "9"), link.uploaded[:10])
    return releases


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
