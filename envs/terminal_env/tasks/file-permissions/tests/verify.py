import hashlib
import os

from errata_verify import WORKSPACE, check, data, mode, path, require

CONTENT = {
    "site/.hidden.conf": "d4c9ec2691096d4f9b8e711b7772cb78b641e918de69423c920e22891c0712d3",
    "site/bin/README": "307a1bd16d58f6e6612fae5eb09cdd4115d4d1377f886acb19ed6cfc3a7a2502",
    "site/bin/backup.sh": "40d48be194caa6843aa6c5f2f5b28d70699996622b0f218e8f626607a426fa5a",
    "site/bin/deploy.sh": "bfa0e8c3305611a1a1b4fb57e576871f5e7bfb0c81625a6f097655431d246cdd",
    "site/conf/app.conf": "27e4577db47c652f781c7ea7ea4a5b7d19351b657e5cf831d11a5eac30940d10",
    "site/conf/secrets/api token.key": "4ee38d2f64f84d01c8b21c17975cd037d3593db3827e18f392e1d91b2442135a",
    "site/conf/secrets/db.key": "58ec115287619e3a5cdbb2d62e288ba34af13e1193acbd7ec21e02249317a827",
    "site/data/archive/2025.csv": "211b323a11bdb557f5690d4acda8867ed02c9d47ee9b978c30d6ab4137b9c018",
    "site/data/users.csv": "d83f3d8a94be5a324509975f61dd015900a20be055d5f94e08e28fe0950e9bd1",
}
DIRECTORIES = {"site", "site/bin", "site/conf", "site/conf/secrets", "site/data", "site/data/archive"}
LINKS = {"site/bin/conf"}


@require
def nothing_but_permissions_changed():
    found = set()
    for folder, folders, files in os.walk(path("site")):
        found |= {os.path.relpath(os.path.join(folder, name), WORKSPACE) for name in folders + files}
    assert found == (set(CONTENT) | DIRECTORIES | LINKS) - {"site"}, "names changed"
    for name, digest in CONTENT.items():
        assert hashlib.sha256(data(name)).hexdigest() == digest, f"{name} changed"
    assert os.readlink(path("site/bin/conf")) == "../conf/app.conf"


def wanted(name):
    if name in DIRECTORIES or name.endswith(".sh"):
        return 0o750
    return 0o600 if "/secrets/" in name else 0o640


def all_are(names, bits):
    """All of ``names`` have a mode, and nothing has it that should not: `chmod -R 750` is worth nothing."""
    for name in names:
        assert mode(name) == bits, f"{name} is {mode(name):o}, not {bits:o}"
    for name in sorted(DIRECTORIES | set(CONTENT)):
        assert mode(name) != bits or wanted(name) == bits, f"{name} is {bits:o} too"


@check()
def directories():
    all_are(sorted(DIRECTORIES), 0o750)


@check()
def scripts():
    all_are([name for name in CONTENT if name.endswith(".sh")], 0o750)


@check()
def secrets():
    all_are([name for name in CONTENT if wanted(name) == 0o600], 0o600)


@check()
def other_files():
    all_are([name for name in CONTENT if wanted(name) == 0o640], 0o640)
