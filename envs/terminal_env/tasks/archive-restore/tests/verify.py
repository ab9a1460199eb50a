import os

from errata_verify import NotSolved, check, lines, mode, path, require, sha256, text

DIRECTORIES = {
    "bin": 0o755,
    "bin/settings": 0o770,
    "site": 0o755,
    "site/logs": 0o777,
    "site/pages": 0o705,
    "site/private": 0o700,
    "site/versions": 0o755,
    "site/versions/v2": 0o755,
}
FILES = {
    "bin/settings/local.ini": (0o640, "level = debug\n"),
    "bin/start": (0o750, "#!/bin/sh\necho up\n"),
    "site/logs/.keep": (0o644, ""),
    "site/logs/app.log": (0o666, "first line\nsecond line\n"),
    "site/pages/about.html": (0o644, "<h1>About</h1>\n"),
    "site/pages/index.html": (0o644, "<h1>Welcome</h1>\n"),
    "site/private/home": (0o444, "<h1>At home</h1>\n"),
    "site/private/key": (0o600, "k-5520c1\n"),
    "site/versions/v2/app.js": (0o664, "two\n"),
}
LINKS = {"site/current": "versions/v2", "site/settings.ini": "private/key"}


ARCHIVES = {
    "2025-12-01.full.tar.gz": True,
    "2025-12-02.tar.xz": True,
    "2025-12-03.tar.bz2": True,
    "2025-12-04.tar.gz": True,
    "2025-12-05.tar.gz": False,
    "2025-12-06.tar.xz": True,
}
"""Whether each is as its checksum says; packing them again gives other bytes with another tar or xz."""


@require
def the_archives_are_as_they_were():
    assert sorted(os.listdir(path("backups"))) == sorted([*ARCHIVES, "SHA256SUMS"])
    sums = dict(reversed(line.split()) for line in lines("backups/SHA256SUMS"))
    for name, whole in ARCHIVES.items():
        assert (sums.get(name) == sha256("backups/" + name)) is whole, f"{name} changed"


@check(weight=2)
def files_have_the_newest_restorable_content():
    for name, (_, content) in FILES.items():
        if os.path.islink(path("restored/" + name)):
            raise NotSolved(f"{name} is a link")
        assert text("restored/" + name) == content, name


@check(needs=[files_have_the_newest_restorable_content])
def nothing_else_is_there():
    found = set()
    for folder, folders, files in os.walk(path("restored")):
        found |= {os.path.relpath(os.path.join(folder, name), path("restored")) for name in folders + files}
    assert found == set(DIRECTORIES) | set(FILES) | set(LINKS)


@check(needs=[files_have_the_newest_restorable_content])
def links_are_links():
    for name, target in LINKS.items():
        try:
            found = os.readlink(path("restored/" + name))
        except OSError as error:
            raise NotSolved(f"{name}: {error.strerror}") from error
        assert found == target, f"{name} leads to {found}"


@check(needs=[files_have_the_newest_restorable_content])
def permissions_are_as_archived():
    for name, wanted in [*DIRECTORIES.items(), *((name, bits) for name, (bits, _) in FILES.items())]:
        assert mode("restored/" + name) == wanted, f"{name} is {mode('restored/' + name):o}, not {wanted:o}"


@check(weight=0.5, needs=[files_have_the_newest_restorable_content])
def the_day_is_named():
    assert text("restored_day.txt").strip() == "2025-12-04"
