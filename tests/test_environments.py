"""scripts/environments.py: each environment is made once for a user, whole or not at all, and shared by checkouts.

A program stands in for uv: it notes what it is asked for and writes one file. No index is asked.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
UV = """#!/bin/sh
echo "uv $*" >>"$CALLS"
for last; do :; done
case "$1 $2" in
venv*)
    mkdir -p "$last/bin" "$last/lib"
    printf '#!/bin/sh\\necho python $* >>"$CALLS"\\n' >"$last/bin/python"
    chmod +x "$last/bin/python"
    ;;
"pip compile") cat "$CALLS.newest" ;;
"pip install")
    [ ! -e "$CALLS.broken" ] || { echo "no route to the index" >&2; exit 2; }
    while [ "$1" != --python ]; do shift; done
    echo "$*" >"${2%/bin/python}/lib/$$"
    ;;
esac
"""


@pytest.fixture(scope="module")
def environments() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environments", ROOT / "scripts/environments.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Place:
    """A user's cache and checkouts, with the program that stands in for uv."""

    def __init__(self, module: ModuleType, directory: Path) -> None:
        self.module = module
        self.directory = directory
        self.calls_file = directory / "calls"
        self.cache = directory / "cache"
        uv = self.checkout("first").uv_place()
        (uv / "bin").mkdir(parents=True)
        (uv / "bin/uv").write_text(UV)
        (uv / "bin/uv").chmod(0o755)
        (uv / "bin/python").symlink_to("/bin/true")  # pip has no configuration
        (uv / module.MARKER).touch()

    def checkout(self, name: str) -> Any:
        """Return a checkout, which is made if it is not there."""
        root = self.directory / name
        if not root.exists():
            (root / "requirements").mkdir(parents=True)
            for folder in self.module.DISTRIBUTIONS:
                (root / folder).mkdir(exist_ok=True)
                (root / folder / "pyproject.toml").write_text("[project]\n")
            locks = {
                "uv": "pip==1 \\\n    --hash=sha256:00\nuv==2\n",
                "dev": "# of a test\npackaging==26\npytest==9\n",
                "trainer": "torch==3\ntrl==4\n",
                "interop-0.3": "openenv==0.3\n",
                "interop-0.4": "openenv==0.4\n",
            }
            for lock, text in locks.items():
                (root / f"requirements/{lock}.lock").write_text(text)
        return self.module.Checkout(root, self.cache)

    def calls(self) -> list[str]:
        """Return what was called since the last time."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.unlink()
        return lines

    def made(self) -> list[str]:
        """Return the names of the cache's environments, without keys."""
        return sorted(path.name.rpartition("-")[0] for path in (self.cache / "environments").glob("*-*"))


@pytest.fixture
def place(environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return Place(environments, tmp_path)


def test_a_second_checkout_installs_nothing_but_the_project(place: Place) -> None:
    first, second = place.checkout("first"), place.checkout("second")
    first.dev()
    venv, packages, compiled, project = place.calls()
    assert venv.startswith("uv venv ") and "--relocatable" in venv
    assert packages.endswith("-r requirements/dev.lock pip==1")
    assert compiled.startswith("python -I -c") and "compileall" in compiled
    assert project.endswith("--no-build-isolation -e . -e conformance -e bench")
    first.dev()
    assert place.calls() == []
    second.dev()
    (again,) = place.calls()
    assert f"{second.here}/venv-dev-" in again and again.endswith("-e . -e conformance -e bench")
    inodes = [{file.stat().st_ino for file in one.here.glob("venv/bin/*")} for one in (first, second)]
    assert inodes[0] == inodes[1] != set()


def test_a_moved_checkout_and_new_entry_points_install_the_project_again(place: Place) -> None:
    place.checkout("first").dev()
    place.calls()
    (place.directory / "first").rename(place.directory / "moved")
    moved = place.checkout("moved")
    moved.dev()
    assert len(place.calls()) == 1
    for folder in (".", "bench"):
        (moved.root / folder / "pyproject.toml").write_text("[project.scripts]\n")
        moved.dev()
        assert len(place.calls()) == 1


def test_a_changed_lock_makes_another_environment_and_the_link_moves(place: Place) -> None:
    checkout = place.checkout("first")
    checkout.locked("interop")
    assert place.made() == ["interop-0.3", "interop-0.4"]
    before = (checkout.here / "interop-0.3").resolve()
    (checkout.requirements / "interop-0.3.lock").write_text("openenv==0.3.1\n")
    place.calls()
    checkout.locked("interop")
    assert len(place.calls()) == 2  # uv venv, uv pip install
    assert (checkout.here / "interop-0.3").resolve() != before
    assert before.is_dir(), "another checkout may use it"


def test_an_interrupted_set_up_is_made_again(place: Place) -> None:
    checkout = place.checkout("first")
    checkout.locked("interop")
    made = (checkout.here / "interop-0.3").resolve()
    (made / place.module.MARKER).unlink()
    (made / "half").touch()
    place.calls()
    checkout.locked("interop")
    assert len(place.calls()) == 2
    assert not (made / "half").exists() and (made / place.module.MARKER).exists()


def test_a_failure_says_what_uv_said_and_leaves_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = place.checkout("first")
    broken = place.directory / "calls.broken"
    broken.touch()
    with pytest.raises(place.module.Stop, match=r"uv failed with status 2 \(\.cache/dev\.log\): check the network"):
        checkout.dev()
    assert capsys.readouterr().err.endswith("no route to the index\n")
    assert place.made() == [] and not (checkout.here / "venv").exists()
    broken.unlink()
    checkout.dev()
    assert (checkout.here / "venv/bin/python").exists()


def test_two_set_ups_at_once_install_once(place: Place) -> None:
    checkouts = [place.checkout(name) for name in ("first", "second", "third")]
    threads = [threading.Thread(target=checkout.locked, args=("interop",)) for checkout in checkouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(call.startswith("uv venv") for call in place.calls()) == 2
    assert all((checkout.here / "interop-0.4/bin/python").exists() for checkout in checkouts)


def test_what_trains_is_added_to_a_copy_and_stays(place: Place) -> None:
    checkout, second = place.checkout("first"), place.checkout("second")
    checkout.dev()
    without = (checkout.here / "venv").resolve()
    place.calls()
    checkout.trainer()
    torch, rest, _compiled, project = place.calls()
    assert torch.startswith("python -m pip install ") and torch.endswith(" torch==3")
    assert rest.startswith("uv pip install ") and project.endswith("-e bench")
    venv = (checkout.here / "venv").resolve()
    assert venv.name.startswith("venv-dev-trainer-")
    assert without.is_dir(), "tests that run in it go on"
    checkout.dev()
    assert (checkout.here / "venv").resolve() == venv
    second.dev()  # whoever trains has it from the start
    assert len(place.calls()) == 1 and (second.here / "venv").resolve().name == venv.name


def test_an_environment_that_nobody_uses_is_removed_after_60_days(place: Place) -> None:
    checkout = place.checkout("first")
    checkout.locked("interop")
    old, used = ((checkout.here / f"interop-{version}").resolve() for version in ("0.3", "0.4"))
    for one in (old, used):
        before = time.time() - place.module.UNUSED_S - 60
        os.utime(one / place.module.MARKER, (before, before))
    (checkout.requirements / "interop-0.3.lock").write_text("openenv==0.3.1\n")
    (checkout.requirements / "interop-0.5.lock").write_text("openenv==0.5\n")
    checkout.environment("interop-0.4", "requirements/interop-0.4.lock")
    checkout.locked("interop")
    assert used.is_dir() and not old.exists()
    assert place.made() == ["interop-0.3", "interop-0.4", "interop-0.5"]


def test_the_newest_versions_are_resolved_once_an_hour_or_when_asked(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = place.checkout("first")
    newest = place.directory / "calls.newest"
    newest.write_text("httpx==1\n")
    first = checkout.resolved(anew=True).read_text()
    newest.write_text("httpx==2\n")
    assert checkout.resolved(anew=False).read_text() == first
    assert "httpx==2" in checkout.resolved(anew=True).read_text()
    (checkout.root / "pyproject.toml").write_text("[project.scripts]\n")
    place.calls()
    checkout.resolved(anew=False)
    assert len(place.calls()) == 1


CONFIGURED = """\
:env:.cert='/ca.pem'
global.cert='/other.pem'
global.default-timeout='180'
global.find-links='/bin /not/there https://wheels.example'
global.index-url='https://index.example/simple'
install.no-index='true'
"""


def test_uv_reads_what_pip_reads(environments: ModuleType) -> None:
    assert environments.settings_of_uv(CONFIGURED, {}) == {
        "UV_SYSTEM_CERTS": "true",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_FIND_LINKS": "/bin,https://wheels.example",
        "UV_NO_INDEX": "true",
        "UV_HTTP_TIMEOUT": "180",
        "SSL_CERT_FILE": "/ca.pem",
    }


def test_a_user_who_configured_uv_keeps_that(environments: ModuleType) -> None:
    settings = environments.settings_of_uv(CONFIGURED, {"UV_INDEX_URL": "https://mine.example", "SSL_CERT_FILE": "/m"})
    assert settings == {"UV_SYSTEM_CERTS": "true", "UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_TIMEOUT": "180"}


def test_every_name_has_its_locks(environments: ModuleType) -> None:
    for name in environments.LOCKED:
        assert list((ROOT / "requirements").glob(f"{name}-*.lock")), name
    tools = environments.Checkout(ROOT, Path("nowhere")).tools()
    assert {tool.split("==")[0] for tool in tools} == set(environments.TOOLS)


def test_an_unknown_name_is_answered_with_the_names(tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(ROOT / "scripts/environments.py"), "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "upstream-patches" in done.stderr
