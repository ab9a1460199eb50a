import os

from errata_verify import WORKSPACE, NotSolved, check, path, require, text

KEPT = ["v1.10.0", "v1.10.1", "v1.2.0", "v1.9.3"]
NEWEST = "v1.10.1"
UPLOADS = {"ana.png": "ana.png\n", "ben.png": "ben.png\n", "the plan.txt": "the plan\n", ".thumbs": "hidden\n"}
BROKEN = ["releases/v1.10.1/tmp", "shared/loop-a", "shared/loop-b", "releases/v1.9.3/lib/extra.py"]


def target(name):
    """Return what a link of the app leads to, as an absolute path; it has to be relative itself."""
    try:
        found = os.readlink(path("app/" + name))
    except OSError as error:
        raise NotSolved(f"{name}: {error.strerror}") from error
    assert not found.startswith("/"), f"{name} leads to {found}: not relative"
    return os.path.normpath(os.path.join(WORKSPACE, "app", os.path.dirname(name), found))


@require
def nothing_of_value_is_lost():
    assert text("app/shared/config.ini") == "listen = 8080\n"
    assert text("app/pinned") == "v1.2.0\n"
    assert text("app/shared/uploads/ana.png") == UPLOADS["ana.png"]
    for name in KEPT:
        assert text(f"app/releases/{name}/main.py") == f"program {name[1:]}\n"
        assert text(f"app/releases/{name}/lib/core.py") == f"library {name[1:]}\n"
        assert text(f"app/releases/{name}/.complete") == ""
    assert os.readlink(path("app/releases/v1.10.1/lib/engine.py")) == "core.py", "a link that was in order is gone"
    uploads = path("app/releases/v1.10.0/uploads")
    for name in () if os.path.islink(uploads) else os.listdir(uploads):
        assert name in UPLOADS or name == "uploads", f"uploads/{name} is new"
    for name, content in UPLOADS.items():
        places = [place + name for place in ("app/shared/uploads/", "app/releases/v1.10.0/uploads/")]
        assert any(os.path.isfile(path(place)) and text(place) == content for place in places), f"{name} is lost"


@check()
def the_right_releases_stay():
    assert sorted(os.listdir(path("app/releases"))) == KEPT


@check()
def current_is_the_newest_complete_release():
    assert target("current") == path("app/releases/" + NEWEST)


@check()
def releases_use_what_is_shared():
    for name in KEPT:
        assert target(f"releases/{name}/config.ini") == path("app/shared/config.ini")
        assert target(f"releases/{name}/uploads") == path("app/shared/uploads")


@check()
def uploads_are_in_one_place():
    assert sorted(os.listdir(path("app/shared/uploads"))) == sorted(UPLOADS)
    for name, content in UPLOADS.items():
        assert text("app/shared/uploads/" + name) == content, name
    old = path("app/releases/v1.10.0/uploads")
    assert os.path.islink(old) or not os.path.isdir(old) or not os.listdir(old), "they are in the release too"


@check(needs=[current_is_the_newest_complete_release, releases_use_what_is_shared])
def no_link_leads_nowhere():
    for folder, folders, files in os.walk(path("app")):
        for name in folders + files:
            assert os.path.exists(os.path.join(folder, name)), f"{folder}/{name} leads nowhere"
    assert not any(os.path.lexists(path("app/" + name)) for name in BROKEN)
