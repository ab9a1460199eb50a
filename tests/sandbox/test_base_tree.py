"""How base trees are found, and what a built one holds."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from errata_protocol.errors import SandboxUnavailable
from errata_server.sandbox.base_trees import tree, verifier_packages
from errata_server.sandbox.base_trees.agent_modes import restrict_modes
from errata_server.sandbox.base_trees.apt_source import AptSource
from errata_server.sandbox.base_trees.recipe import (
    AGENT_UID,
    VERIFIER_PACKAGES,
    content_digest,
    prepare,
    recipe_digest,
)
from errata_server.sandbox.base_trees.tree import BaseTree, build_base, find_base, needs_build
from errata_server.sandbox.base_trees.verifier_packages import install_verifier_packages
from errata_server.sandbox.host.privileges import check_privileges
from tests.hangs import HANGS_S


def plain_tree(root: Path, *, package: str = "bash 5.2") -> Path:
    for name in ("bin", "etc", "var/lib/dpkg"):
        (root / name).mkdir(parents=True)
    (root / "bin/bash").write_bytes(b"\x7fELF")
    (root / "var/lib/dpkg/status").write_text(package)
    return root


def built_tree(bases: Path, name: str = "default", *, recipe: str | None = None, content: str = "1f0c") -> Path:
    path = bases / f"{name}-{content}"
    plain_tree(path / "root")
    record = {"id": path.name, "recipe": recipe or recipe_digest(), "suite": "bookworm"}
    (path / "base.json").write_text(json.dumps(record))
    (bases / name).unlink(missing_ok=True)
    (bases / name).symlink_to(path.name)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ERRATA_BASE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bases = tmp_path / "cache/errata/bases"
    bases.mkdir(parents=True)
    return bases


class TestAnInstalledSystem:
    """``errata base build --system``; ``make test-docker`` makes the tree of an image with it."""

    def test_a_directory_that_is_none_is_refused_and_stays(self, home: Path, tmp_path: Path) -> None:
        (tmp_path / "system/etc").mkdir(parents=True)
        with pytest.raises(SandboxUnavailable, match="not the root directory of an installed Debian"):
            build_base(system=tmp_path / "system")
        assert (tmp_path / "system/etc").is_dir()
        assert list(home.glob("default*")) == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="root alone can make a tree of an installed system")
    def test_what_does_not_run_is_not_published(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        system = tmp_path / "system"
        for name in ("usr/bin/bash", "usr/lib/os-release"):
            (system / name).parent.mkdir(parents=True, exist_ok=True)
            (system / name).write_text("VERSION_CODENAME=bookworm\n")
        (system / "dev").mkdir()
        monkeypatch.setattr(tree, "install_verifier_packages", lambda root: None)
        with pytest.raises(SandboxUnavailable, match="the new base tree does not work"):
            build_base(system=system)
        assert list(home.glob("default*")) == []


class TestFinding:
    def test_without_a_tree_one_line_says_what_to_run(self, home: Path) -> None:
        with pytest.raises(SandboxUnavailable) as caught:
            find_base("nowhere")
        assert "errata base build" in caught.value.message
        assert str(home) in caught.value.message
        assert "\n" not in caught.value.message

    def test_the_link_names_the_tree_and_its_id(self, home: Path) -> None:
        path = built_tree(home)
        assert find_base() == BaseTree("default", path / "root", "default-1f0c")

    def test_the_environments_directory_comes_before_the_cache(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built_tree(home, content="cafe")
        (tmp_path / "mine").mkdir()
        mine = built_tree(tmp_path / "mine", content="beef")
        monkeypatch.setenv("ERRATA_BASE_DIR", str(tmp_path / "mine"))
        assert find_base().root == mine / "root"

    def test_a_named_directory_comes_first_and_may_be_any_system(self, home: Path, tmp_path: Path) -> None:
        built_tree(home)
        root = plain_tree(tmp_path / "ubuntu")
        tree = find_base("default", {"default": root})
        assert tree.root == root
        assert re.fullmatch(r"tree-[0-9a-f]{16}", tree.id)

    def test_an_id_kept_in_a_snapshot_finds_its_tree_after_a_rebuild(self, home: Path) -> None:
        old = built_tree(home, content="0001")
        new = built_tree(home, content="0002")
        assert find_base().root == new / "root"
        assert find_base("default-0001").root == old / "root"

    def test_an_id_kept_in_a_snapshot_finds_a_named_tree(self, home: Path, tmp_path: Path) -> None:
        named = {"plain": plain_tree(tmp_path / "plain"), "built": built_tree(tmp_path, "other")}
        for name in named:
            tree = find_base(name, named)
            assert find_base(tree.id, named).root == tree.root

    def test_the_fingerprint_of_a_plain_tree_changes_with_its_packages(self, home: Path, tmp_path: Path) -> None:
        root = plain_tree(tmp_path / "plain")
        before = find_base("a", {"a": root}).id
        assert find_base("b", {"b": root}).id == before
        (root / "var/lib/dpkg/status").write_text("bash 5.3")
        assert find_base("a", {"a": root}).id != before

    def test_a_directory_without_a_shell_is_no_base_tree(self, home: Path, tmp_path: Path) -> None:
        with pytest.raises(SandboxUnavailable, match="no /bin/bash"):
            find_base("x", {"x": tmp_path})

    @pytest.mark.parametrize("name", ["", "../default", "a/b", ".hidden", "x" * 200])
    def test_a_name_that_is_a_path_is_refused(self, home: Path, name: str) -> None:
        with pytest.raises(SandboxUnavailable, match="cannot be the name"):
            find_base(name)

    def test_a_damaged_record_is_reported_with_the_next_step(self, home: Path) -> None:
        path = built_tree(home)
        (path / "base.json").write_text("{")
        with pytest.raises(SandboxUnavailable, match=r"remove .* and build it"):
            find_base()


def fake_bootstrap(root: Path, source: AptSource, packages: Path, progress: Callable[[str], None]) -> None:
    """Write what `prepare` needs of a bootstrapped system, with everything in it that must not stay."""
    plain_tree(root)
    for name in ("dev", "tmp", "var/tmp", "usr/share/doc/git", "usr/share/man/man1", "etc/skel", "etc/apt", "opt"):
        (root / name).mkdir(parents=True)
    for name, text in {
        "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
        "etc/group": "root:x:0:\n",
        "etc/shadow": "root:*:19000:0:99999:7:::\n",
        "etc/gshadow": "root:*::\n",
        "etc/skel/.profile": "umask 022\n",
        "etc/resolv.conf": "nameserver 192.0.2.7\n",
        "etc/hostname": "the-host\n",
        "usr/share/doc/git/README": "long\n",
        "usr/share/doc/git/copyright": "GPL\n",
        "usr/share/man/man1/git.1": "long\n",
        "var/cache/apt/pkg.bin": "",
        "bin/su": "",
        "opt/open": "",
    }.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(text)
    (root / "bin/su").chmod(0o4755)
    (root / "opt").chmod(0o2777)
    (root / "opt/open").chmod(0o666)
    os.mkfifo(root / "dev/pipe")
    os.mkfifo(root / "opt/pipe")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to the agent's uid, which needs root")
class TestBuilding:
    @pytest.fixture
    def builds(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AptSource]]:
        made: list[AptSource] = []

        def bootstrap(root: Path, source: AptSource, packages: Path, progress: Callable[[str], None]) -> None:
            made.append(source)
            fake_bootstrap(root, source, packages, progress)

        monkeypatch.setattr(tree, "_check_machine", lambda: None)
        monkeypatch.setattr(tree, "_bootstrap", bootstrap)
        monkeypatch.setattr(tree, "_add_verifier_packages", lambda root, mounts: None)
        monkeypatch.setattr(tree, "_smoke", lambda root, mounts: None)
        return made

    def test_a_second_build_returns_the_tree_there_is(self, home: Path, builds: list[AptSource]) -> None:
        assert needs_build()
        lines: list[str] = []
        first = build_base(progress=lines.append)
        assert lines
        assert not needs_build()
        assert build_base() == first == find_base()
        assert len(builds) == 1

    def test_another_recipe_builds_anew_and_keeps_the_old_tree(self, home: Path, builds: list[AptSource]) -> None:
        old = built_tree(home, recipe="an older one")
        assert needs_build()
        new = build_base()
        assert new.id != old.name
        assert find_base() == new
        assert find_base(old.name).root == old / "root"

    def test_another_suite_builds_anew(self, home: Path, builds: list[AptSource]) -> None:
        build_base(suite="bookworm", mirror="http://a.example/debian")
        build_base(suite="trixie", mirror="http://a.example/debian")
        assert [source.suite for source in builds] == ["bookworm", "trixie"]

    def test_a_failed_build_leaves_nothing_but_the_packages(
        self, home: Path, builds: list[AptSource], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(root: Path, mounts: bool) -> None:
            raise SandboxUnavailable("the new base tree does not work")

        monkeypatch.setattr(tree, "_smoke", broken)
        with pytest.raises(SandboxUnavailable):
            build_base()
        assert {path.name for path in home.iterdir()} == {".default.lock", ".packages"}

    def test_the_rest_of_a_killed_build_is_cleared_away(self, home: Path, builds: list[AptSource]) -> None:
        (home / ".default.building/root/etc").mkdir(parents=True)
        tree = build_base()
        assert not (home / ".default.building").exists()
        assert not (tree.root.parent / "root/etc/mtab").exists()

    def test_the_tree_holds_nothing_of_the_host_and_gives_no_privilege(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        fake_bootstrap(root, AptSource("bookworm", ""), tmp_path, print)
        prepare(root)
        assert (root / "etc/hostname").read_text() == "sandbox\n"
        assert (root / "etc/resolv.conf").read_text() == ""
        assert list((root / "dev").iterdir()) == []
        assert not (root / "usr/share/man").exists()
        assert [path.name for path in (root / "usr/share/doc/git").iterdir()] == ["copyright"]
        assert not (root / "opt/pipe").exists()
        assert_no_privileges(root)

    def test_files_outside_are_not_reached_through_a_link_of_the_tree(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        fake_bootstrap(root, AptSource("bookworm", ""), tmp_path, print)
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "kept").write_text("host\n")
        (outside / "kept").chmod(0o666)
        (root / "etc/resolv.conf").unlink()
        (root / "etc/resolv.conf").symlink_to(outside / "kept")
        (root / "var/log").symlink_to(outside)
        (root / "opt/link").symlink_to(outside / "kept")
        prepare(root)
        assert (outside / "kept").read_text() == "host\n"
        assert stat.S_IMODE((outside / "kept").stat().st_mode) == 0o666

    def test_the_content_digest_sees_owners_modes_links_and_bytes_but_not_times(self, tmp_path: Path) -> None:
        root = plain_tree(tmp_path / "root")
        (root / "etc/link").symlink_to("motd")
        (root / "etc/motd").write_text("hello")
        digests = [content_digest(root)]
        os.utime(root / "etc/motd", (1, 1))
        assert content_digest(root) == digests[0]
        (root / "etc/motd").write_text("hellO")
        digests.append(content_digest(root))
        (root / "etc/motd").chmod(0o600)
        digests.append(content_digest(root))
        os.chown(root / "etc/motd", 1, 1)
        digests.append(content_digest(root))
        (root / "etc/link").unlink()
        (root / "etc/link").symlink_to("other")
        digests.append(content_digest(root))
        assert len(set(digests)) == len(digests)


def assert_no_privileges(root: Path) -> None:
    writable = {"workspace", "home/agent", "tmp", "var/tmp"}
    for directory, subdirectories, files in os.walk(root):
        for name in [*subdirectories, *files]:
            path = Path(directory, name)
            inside = str(path.relative_to(root))
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                continue
            assert stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode), inside
            assert not status.st_mode & (stat.S_ISUID | stat.S_ISGID), inside
            assert "security.capability" not in os.listxattr(path), inside
            if not any(inside == top or inside.startswith(top + "/") for top in writable):
                assert status.st_uid != AGENT_UID and status.st_gid != AGENT_UID, inside
                assert not status.st_mode & stat.S_IWOTH, inside


def test_without_root_and_user_namespaces_one_line_says_what_to_turn_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "proc/sys/kernel/unprivileged_userns_clone"
    switch.parent.mkdir(parents=True)
    switch.write_text("0\n")
    monkeypatch.setattr(tree, "check_privileges", lambda: check_privileges(1000, proc=tmp_path / "proc"))
    monkeypatch.setattr(tree.shutil, "which", lambda tool, path: f"/bin/{tool}")
    with pytest.raises(SandboxUnavailable) as caught:
        build_base()
    assert "sysctl -w kernel.unprivileged_userns_clone=1" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_tree_of_one_owner_is_closed_but_for_the_agents_directories(tmp_path: Path) -> None:
    for name in ("etc", "home/agent/.config", "workspace", "root"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root").chmod(0o700)
    modes = {"etc/hosts": 0o644, "etc/shadow": 0o640, "home/agent/.profile": 0o600, "root/x": 0o600}
    for name, mode in modes.items():
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "etc/link").symlink_to("/nowhere")
    restrict_modes(tmp_path)
    seen = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in (*modes, "etc", "root", "workspace")}
    assert seen == {
        "etc/hosts": 0o444,
        "etc/shadow": 0o040,
        "home/agent/.profile": 0o600,
        "root/x": 0,
        "etc": 0o555,
        "root": 0,
        "workspace": 0o755,
    }


def test_a_missing_tool_is_named_by_its_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tree.shutil, "which", lambda tool, path: None if tool == "debootstrap" else f"/bin/{tool}")
    with pytest.raises(SandboxUnavailable, match="apt-get install debootstrap"):
        build_base()


@pytest.mark.sandbox
def test_a_program_of_a_build_that_takes_too_long_is_an_error_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    root = find_base().root
    monkeypatch.setattr(tree, "_STEP_TIMEOUT_S", 0.3)
    with pytest.raises(SandboxUnavailable, match=r"took more than 0\.3 s and was killed"):
        tree._inside(root, "sleep 600.31", "0:0", mounts=True)


@pytest.mark.sandbox
class TestTheDefaultTree:
    @pytest.fixture
    def tree(self) -> BaseTree:
        return find_base()

    def inside(self, tree: BaseTree, command: str) -> subprocess.CompletedProcess[str]:
        # a tmpfs on /tmp: nothing is ever written into the tree itself
        mounts = f"mount --bind /dev {tree.root}/dev && mount -t tmpfs -o mode=1777 tmp {tree.root}/tmp"
        enter = f'{mounts} && exec chroot --userspec={AGENT_UID}:{AGENT_UID} {tree.root} /bin/bash -c "$0"'
        arguments = ["unshare", "--mount", "--net", "--", "/bin/sh", "-c", enter, command]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/agent", "LC_ALL": "C.UTF-8"}
        return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False)

    def test_it_comes_from_todays_recipe(self, tree: BaseTree) -> None:
        assert not needs_build(directory=tree.root.parent.parent)

    def test_it_gives_no_privilege(self, tree: BaseTree) -> None:
        assert_no_privileges(tree.root)

    def test_it_holds_nothing_of_the_host(self, tree: BaseTree) -> None:
        for name in ("etc/resolv.conf", "etc/machine-id", "etc/apt/sources.list"):
            assert (tree.root / name).read_text() == ""
        for name in ("dev", "proc", "sys", "run", "tmp", "var/tmp", "var/log"):
            assert list((tree.root / name).iterdir()) == [], name

    def test_the_agent_is_a_user_of_its_own(self, tree: BaseTree) -> None:
        result = self.inside(tree, "id -un; id -u; id -G; cd ~; pwd; stat -c %U:%a /workspace /home/agent; hostname -f")
        assert result.stdout.splitlines()[:6] == [
            "agent",
            str(AGENT_UID),
            str(AGENT_UID),
            "/home/agent",
            "agent:755",
            "agent:755",
        ]

    def test_it_has_the_tools_that_agents_use(self, tree: BaseTree) -> None:
        tools = "python3 python git gcc make jq perl awk sed grep rg sqlite3 curl file less tar unzip xz ps patch bc"
        result = self.inside(tree, f"for tool in {tools}; do command -v $tool >/dev/null || echo $tool; done")
        assert result.stdout == ""

    def test_pytest_and_a_c_program_run_as_the_agent(self, tree: BaseTree) -> None:
        result = self.inside(
            tree,
            "cd /tmp && echo 'def test_x(): assert 1' > test_x.py"
            " && python3 -m pytest -q -p no:cacheprovider && echo 'int main(void){return 7;}' > a.c"
            " && gcc a.c && ./a.out",
        )
        assert "1 passed" in result.stdout
        assert result.returncode == 7

    def test_git_has_no_identity_and_trusts_every_directory(self, tree: BaseTree) -> None:
        result = self.inside(tree, "cd /tmp && git init -q && git commit --allow-empty -m x")
        assert "tell me who you are" in result.stderr
        assert self.inside(tree, "git config safe.directory").stdout == "*\n"

    def test_the_agent_writes_nowhere_but_in_its_own_directories(self, tree: BaseTree) -> None:
        result = self.inside(tree, "find / -xdev -writable ! -type l ! -path '/dev/*' 2>/dev/null")
        paths = set(result.stdout.split())
        assert {"/workspace", "/home/agent", "/tmp", "/var/tmp"} <= paths
        own = ("/workspace", "/home/agent", "/tmp", "/var/tmp")
        assert [path for path in paths if not path.startswith(own)] == []


class TestVerifierPackages:
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "root/usr/bin").mkdir(parents=True)
        (tmp_path / "root/usr/bin/python3.11").touch()
        return tmp_path / "root"

    def test_an_index_that_does_not_answer_is_said_with_what_to_set(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(SandboxUnavailable, match=r"No matching distribution.*PIP_INDEX_URL.*PIP_FIND_LINKS"):
            install_verifier_packages(self.root(tmp_path))

    def test_without_pip_and_uv_it_says_how_to_get_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verifier_packages.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SandboxUnavailable, match="ensurepip"):
            install_verifier_packages(self.root(tmp_path))

    def test_each_package_is_pinned_by_version_and_hash(self) -> None:
        assert {"pytest", "pytest-json-ctrf", "requests"} <= {name for name, _, _ in VERIFIER_PACKAGES}
        assert all(version and len(digest) == 64 for _, version, digest in VERIFIER_PACKAGES)
