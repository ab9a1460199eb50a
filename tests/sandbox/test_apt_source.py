"""The mirror, suite and keyring of a base tree come from the host's own apt configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_server.sandbox.base_trees.apt_source import choose_source, proxy_environment

DEBIAN = 'ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'
UBUNTU = "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n"


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    return tmp_path


def test_a_one_line_source_of_the_hosts_release_is_taken(etc: Path) -> None:
    (etc / "os-release").write_text(DEBIAN)
    (etc / "apt/sources.list").write_text(
        "# deb http://commented.example/debian bookworm main\n"
        "deb-src http://source.example/debian bookworm main\n"
        "deb http://security.example/debian-security bookworm-security main\n"
        "deb [arch=amd64 signed-by=/nowhere.gpg] http://mirror.example/debian/ bookworm main contrib # near\n"
    )
    source = choose_source(etc=etc)
    assert (source.suite, source.mirror) == ("bookworm", "http://mirror.example/debian")
    assert source.components == ("main",)
    assert source.keyring is None  # the file it names does not exist


def test_a_deb822_source_is_taken_with_its_keyring_and_universe_on_ubuntu(etc: Path) -> None:
    keyring = etc / "ubuntu.gpg"
    keyring.write_bytes(b"")
    (etc / "os-release").write_text(UBUNTU)
    (etc / "apt/sources.list").write_text("# Ubuntu sources have moved to ubuntu.sources\n")
    (etc / "apt/sources.list.d/ubuntu.sources").write_text(
        "Types: deb\nEnabled: no\nURIs: http://off.example/ubuntu\nSuites: noble\nComponents: main\n\n"
        "# the archive\nTypes: deb deb-src\nURIs: http://near.example/ubuntu/\n"
        "Suites: noble noble-updates\n noble-backports\nComponents: main universe\n"
        f"Signed-By: {keyring}\n"
    )
    source = choose_source(etc=etc)
    assert (source.suite, source.mirror) == ("noble", "http://near.example/ubuntu")
    assert source.components == ("main", "universe")
    assert source.keyring == keyring


def test_a_key_written_into_the_source_leaves_the_keyring_to_debootstrap(etc: Path) -> None:
    (etc / "os-release").write_text(DEBIAN)
    (etc / "apt/sources.list.d/debian.sources").write_text(
        "Types: deb\nURIs: http://a.example/debian\nSuites: bookworm\nComponents: main\n"
        "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mDMEY865UxYJ\n -----END PGP PUBLIC KEY BLOCK-----\n"
    )
    source = choose_source(etc=etc)
    assert source.mirror == "http://a.example/debian"
    assert source.keyring is None


def test_the_mirror_list_of_a_cloud_image_is_followed(etc: Path) -> None:
    mirrors = etc / "debian.list"
    mirrors.write_text("# mirrors\nhttp://cdn.example/debian priority:1\n")
    (etc / "os-release").write_text(DEBIAN)
    (etc / "apt/sources.list.d/debian.sources").write_text(
        f"Types: deb\nURIs: mirror+file://{mirrors}\nSuites: bookworm bookworm-updates\nComponents: main\n"
    )
    assert choose_source(etc=etc).mirror == "http://cdn.example/debian"


def test_sources_that_debootstrap_cannot_fetch_are_passed_over(etc: Path) -> None:
    (etc / "os-release").write_text(DEBIAN)
    (etc / "apt/sources.list").write_text(
        "deb cdrom:[Debian 12]/ bookworm main\ndeb http://next.example/debian bookworm main\n"
    )
    assert choose_source(etc=etc).mirror == "http://next.example/debian"


def test_another_distribution_builds_from_debians_own_archive(etc: Path) -> None:
    (etc / "os-release").write_text("ID=fedora\nVERSION_ID=41\n")
    source = choose_source(etc=etc)
    assert (source.suite, source.mirror) == ("bookworm", "http://deb.debian.org/debian")


def test_an_ubuntu_without_readable_sources_builds_from_ubuntus_archive(etc: Path) -> None:
    (etc / "os-release").write_text(UBUNTU)
    source = choose_source(etc=etc)
    assert (source.mirror, source.components) == ("http://archive.ubuntu.com/ubuntu", ("main", "universe"))


def test_what_the_caller_names_comes_first(etc: Path) -> None:
    (etc / "os-release").write_text(DEBIAN)
    (etc / "apt/sources.list").write_text("deb http://mirror.example/debian bookworm main\n")
    assert choose_source(mirror="http://mine.example/debian/", etc=etc).mirror == "http://mine.example/debian"
    other = choose_source(suite="trixie", etc=etc)
    assert (other.suite, other.mirror) == ("trixie", "http://deb.debian.org/debian")


def test_the_callers_proxy_reaches_wget_in_lower_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    assert proxy_environment()["http_proxy"] == "http://proxy.example:3128"


def test_apts_proxy_is_used_where_the_environment_names_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    configuration = tmp_path / "apt.conf"
    configuration.write_text('Acquire::http::Proxy "http://apt.example:3142/";\nAcquire::https::Proxy "DIRECT";\n')
    monkeypatch.setenv("APT_CONFIG", str(configuration))
    assert proxy_environment() == {"http_proxy": "http://apt.example:3142/"}
