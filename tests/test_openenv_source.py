"""``make openenv-source``: what it takes for a source, what it exports, and what it says where something is missing."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from .openenv_source import ABSENT, SCRIPT
from .upstream.suite import FILES
from .upstream_envs.conftest import VERDICTS

NEEDED = [
    "LICENSE",
    *(f"tests/core/{file}" for file in FILES),
    *(f"envs/{name}/openenv.yaml" for name in ("echo_env", *VERDICTS)),
    *(f"envs/{name}_env/client.py" for name in ("dipg_safety", "dm_control", "unity")),
    "envs/tbench2_env/server/tbench2_env_environment.py",
    "examples/agent_world_model/example_usage.py",
    *(f"docs/source/{page}.md" for page in ("environments/coding", "environments/repl", "reference/core")),
    "docs/source/_toctree.yml",
]
OTHERS = ["README.md", "src/openenv/__init__.py", "tests/core/test_other.py", "envs/other_env/openenv.yaml"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"GIT_CONFIG_GLOBAL": os.devnull}


def git(where: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A Name", "-c", "user.email=name@example.org")
    done = subprocess.run(
        ["git", "-C", where, *identity, *arguments], env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@dataclass(frozen=True)
class Checkout:
    """A repository laid out as OpenEnv's, from which the script exports.

    Args:
        path: Top of the repository.
        cache: The user's cache, for ``XDG_CACHE_HOME``.
    """

    path: Path
    cache: Path

    def commit(self) -> str:
        """Commit what is there; return the commit's hash."""
        git(self.path, "add", "--all")
        git(self.path, "commit", "-q", "-m", "A subject")
        return git(self.path, "rev-parse", "HEAD")

    def run(self, *arguments: str | Path, commit: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the script for a commit."""
        variables = {"XDG_CACHE_HOME": str(self.cache), "OPENENV_COMMIT": commit}
        return subprocess.run(
            [SCRIPT, *arguments], env=ENVIRONMENT | variables, cwd=cwd, capture_output=True, text=True, check=False
        )

    def exported(self, commit: str) -> Path:
        """Return where a commit is exported to."""
        return self.cache / "errata" / f"openenv-{commit[:12]}"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    path = tmp_path / "checkout"
    path.mkdir()
    git(path, "init", "-q")
    for name in (*NEEDED, *OTHERS):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{name}\n")
    (path / "envs/chess_env/uv.lock").write_text("x" * 5000)
    (path / "large.bin").write_text("y" * 5000)
    return Checkout(path, tmp_path / "cache")


def files(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["checkout", "git directory", "git directory of a checkout", "linked work tree"])
def test_what_tests_need_is_exported_and_nothing_else(checkout: Checkout, tmp_path: Path, kind: str) -> None:
    commit = checkout.commit()
    (checkout.path / NEEDED[0]).write_text("of another commit\n")
    checkout.commit()
    source = checkout.path
    if kind == "git directory":
        source = tmp_path / "bare"
        git(tmp_path, "clone", "-q", "--bare", str(checkout.path), str(source))
        (source / "config").unlink()  # a copy of no more than HEAD, objects and refs
    elif kind == "git directory of a checkout":
        source = checkout.path / ".git"
    elif kind == "linked work tree":
        source = tmp_path / "linked"
        git(checkout.path, "worktree", "add", "-q", str(source))
    assert checkout.run("--where", commit=commit).returncode == ABSENT
    done = checkout.run(source.name, commit=commit, cwd=source.parent)
    assert done.returncode == 0 and not done.stderr, done.stderr
    tree = checkout.exported(commit)
    assert files(tree) == sorted(NEEDED)
    assert all((tree / name).read_text() == f"{name}\n" for name in NEEDED)
    assert done.stdout.startswith(f"OpenEnv {commit[:12]}: these are in {tree}\n")
    assert "  envs/chess_env\n" in done.stdout
    assert [path.name for path in tree.parent.iterdir()] == [tree.name]
    told = checkout.run("--where", commit=commit)
    assert (told.returncode, told.stdout, told.stderr) == (0, f"{tree}\n", "")


def test_a_partial_clone_without_large_files_will_do(checkout: Checkout, tmp_path: Path) -> None:
    commit = checkout.commit()
    git(checkout.path, "config", "uploadpack.allowFilter", "true")
    source = tmp_path / "partial"
    git(tmp_path, "clone", "-q", "--bare", "--filter=blob:limit=1k", checkout.path.as_uri(), str(source))
    checkout.path.rename(tmp_path / "gone")  # nothing can be fetched later
    absent = git(source, "rev-list", "--objects", "--missing=print", commit)
    assert sum(line.startswith("?") for line in absent.splitlines()) == 2
    assert checkout.run(source, commit=commit).returncode == 0
    assert files(checkout.exported(commit)) == sorted(NEEDED)


def test_a_second_run_changes_nothing(checkout: Checkout) -> None:
    commit = checkout.commit()
    first = checkout.run(checkout.path, commit=commit)
    inode = checkout.exported(commit).stat().st_ino
    second = checkout.run(checkout.path, commit=commit)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "nothing to do" in second.stderr
    assert checkout.exported(commit).stat().st_ino == inode


def test_what_was_taken_away_is_exported_again(checkout: Checkout) -> None:
    commit = checkout.commit()
    checkout.run(checkout.path, commit=commit)
    (checkout.exported(commit) / NEEDED[1]).unlink()
    assert checkout.run("--where", commit=commit).returncode == ABSENT
    assert checkout.run(checkout.path, commit=commit).returncode == 0
    assert files(checkout.exported(commit)) == sorted(NEEDED)


def test_where_nothing_is_exported_the_directory_and_the_command_are_told(checkout: Checkout) -> None:
    told = checkout.run("--where", commit="0" * 40)
    assert (told.returncode, told.stdout) == (ABSENT, f"{checkout.exported('0' * 40)}\n")
    assert told.stderr.count("\n") == 1 and "make openenv-source FROM=DIR" in told.stderr


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("nowhere", "there is no directory nowhere"),
        ("checkout/envs", "checkout/envs is no git directory and no checkout"),
        ("checkout", f"checkout does not have commit {'0' * 40}: git -C checkout fetch https://github.com/"),
    ],
)
def test_a_source_that_will_not_do_is_refused(checkout: Checkout, tmp_path: Path, source: str, told: str) -> None:
    checkout.commit()
    done = checkout.run(source, commit="0" * 40, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(f"openenv-source: {told}"), done.stderr
    assert not done.stdout and not checkout.cache.exists()


@pytest.mark.parametrize("path", ["envs/maze_env/openenv.yaml", f"tests/core/{FILES[0]}"])
def test_a_commit_that_lacks_a_path_is_refused(checkout: Checkout, path: str) -> None:
    (checkout.path / path).unlink()
    commit = checkout.commit()
    done = checkout.run(checkout.path, commit=commit)
    assert done.returncode == 1
    assert f"has no {path.removesuffix('/openenv.yaml')}: nothing is exported" in done.stderr
    assert not checkout.cache.exists()


def test_a_clone_that_lacks_a_file_is_refused_and_leaves_nothing(checkout: Checkout) -> None:
    commit = checkout.commit()
    blob = git(checkout.path, "rev-parse", f"{commit}:envs/maze_env/openenv.yaml")
    (checkout.path / ".git/objects" / blob[:2] / blob[2:]).unlink()
    done = checkout.run(checkout.path, commit=commit)
    assert done.returncode == 1 and f"{checkout.path} does not have envs/maze_env/openenv.yaml: " in done.stderr
    assert list(checkout.cache.glob("errata/*")) == []


@pytest.mark.parametrize("arguments", [[], [""], ["--help"]])
def test_without_a_source_the_command_is_told(checkout: Checkout, arguments: list[str]) -> None:
    done = checkout.run(*arguments, commit="0" * 40)
    assert done.returncode == 2 and "usage: make openenv-source FROM=DIR" in done.stderr
