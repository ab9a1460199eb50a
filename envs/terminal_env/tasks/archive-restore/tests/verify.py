import os

from errata_verify import NotSolved, check, mode, path, text

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


@check(weight=2)
def files_have_the_newest_restorable_content():
    for name, (_, content) in FILES.items():
        if os.path.islink(path("restored/" + name)):
            raise NotSolved(f"{name} is a link")
        assert text("restored/" + name) == content, name


@check()
def nothing_else_is_there():
    found = set()
    for folder, folders, files in os.walk(path("restored")):
        found |= {os.path.relpath(os.path.join(folder, name), path("restored")) for name in folders + files}
    assert found == set(DIRECTORIES) | set(FILES) | set(LINKS)


@check()
def links_are_links():
    for name, target in LINKS.items():
        try:
            found = os.readlink(path("restored/" + name))
        except OSError as error:
            raise NotSolved(f"{name}: {error.strerror}") from error
        assert found == target, f"{name} leads to {found}"


@check()
def permissions_are_as_archived():
    for name, wanted in [*DIRECTORIES.items(), *((name, bits) for name, (bits, _) in FILES.items())]:
        assert mode("restored/" + name) == wanted, f"{name} is {mode('restored/' + name):o}, not {wanted:o}"


@check(weight=0.5)
def the_day_is_named():
    assert text("restored_day.txt").strip() == "2025-12-04"
