"""Runs inside a sandbox: tells what an installation put into an environment, and packs it.

    survey.py list ENVIRONMENT OUTPUT
    survey.py split ENVIRONMENT LISTING TREE SHARED OWN TIME
    survey.py difference ENVIRONMENT LISTING TREE OWN TIME

``list`` writes the digest of every file. ``split`` takes out what belongs to the project in TREE: what is new since
the listing and in the records of no other distribution. It goes into the archive OWN, all else with byte code into
SHARED. ``difference`` writes what is new or other than the listing into OWN; its exit status is 3 where something of
the listing is gone.

An installed copy of the project's code is replaced with a path to the work tree, so that there is one copy, the one
that is repaired.
"""

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

SHADOWED = ("", "src", "lib", "python")
"""Directories of a work tree from which packages are imported."""
LINK = "errata_work_tree.pth"


def main():
    task, environment, listing, *rest = sys.argv[1:]
    environment = environment.rstrip("/")
    if task == "list":
        with open(listing, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump({name: digest(os.path.join(environment, name)) for name in names_of(environment)}, file)
        return 0
    with open(listing, encoding="utf-8", errors="surrogateescape") as file:
        before = json.load(file)
    drop_caches(environment)
    tree, *archives, moment = rest
    moment = int(moment)
    there = names_of(environment)
    if task == "difference":
        gone = [name for name in before if name not in set(there)]
        own = [name for name in there if before.get(name) != digest(os.path.join(environment, name))]
    else:
        gone = []
        others = recorded(environment, tree)
        own = [name for name in there if name not in before and name not in others]
    own = one_copy(environment, tree, own)
    settle(environment, moment)
    pack(archives[-1], environment, own, moment)
    if task == "split":
        for name in own:
            os.unlink(os.path.join(environment, name))
        compile_all(environment, moment)
        pack(archives[0], environment, names_of(environment, byte_code=True), moment)
    if gone:
        print("\n".join(gone[:20]))
        return 3
    return 0


def names_of(environment, byte_code=False):
    """Return the files and links of an environment, relative, sorted."""
    names = []
    for here, subdirectories, files in os.walk(environment):
        links = [name for name in subdirectories if os.path.islink(os.path.join(here, name))]
        names += [os.path.relpath(os.path.join(here, name), environment) for name in files + links]
    return sorted(name for name in names if byte_code or not name.endswith((".pyc", ".pyo")))


def digest(path):
    if os.path.islink(path):
        return "link " + os.readlink(path)
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1024 * 1024):
            total.update(chunk)
    return total.hexdigest()


def drop_caches(environment):
    for here, subdirectories, files in os.walk(environment):
        if "__pycache__" in subdirectories:
            shutil.rmtree(os.path.join(here, "__pycache__"))
            subdirectories.remove("__pycache__")
        for name in files:
            if name.endswith((".pyc", ".pyo")):
                os.unlink(os.path.join(here, name))


def site_packages(environment):
    library = os.path.join(environment, "lib")
    for name in sorted(os.listdir(library)):
        place = os.path.join(library, name, "site-packages")
        if name.startswith("python") and os.path.isdir(place) and not os.path.islink(os.path.join(library, name)):
            return place
    raise SystemExit("no site-packages in " + environment)


def recorded(environment, tree):
    """Return the files that distributions other than the project's record as theirs, relative."""
    site = site_packages(environment)
    found = set()
    for entry in sorted(os.listdir(site)):
        place = os.path.join(site, entry)
        if entry.endswith(".dist-info"):
            if is_of_tree(place, tree):
                continue
            found.update(paths_of(os.path.join(place, "RECORD"), site, environment))
            found.update(below(place, environment))
        elif entry.endswith(".egg-info") and os.path.isdir(place):
            record = os.path.join(place, "installed-files.txt")
            if os.path.exists(record):
                with open(record, encoding="utf-8", errors="surrogateescape") as file:
                    paths = [os.path.normpath(os.path.join(place, line.rstrip("\n"))) for line in file]
                found.update(os.path.relpath(path, environment) for path in paths)
    return found


def is_of_tree(information, tree):
    """Say whether a distribution was installed from the work tree (PEP 610)."""
    try:
        with open(os.path.join(information, "direct_url.json"), encoding="utf-8") as file:
            url = json.load(file)["url"]
    except (OSError, ValueError, KeyError):
        return False
    return url.rstrip("/") == "file://" + tree or url.startswith("file://" + tree + "/")


def paths_of(record, site, environment):
    if not os.path.exists(record):
        return
    with open(record, encoding="utf-8", errors="surrogateescape", newline="") as file:
        for row in csv.reader(file):
            if row:
                yield os.path.relpath(os.path.normpath(os.path.join(site, row[0])), environment)


def below(directory, environment):
    for here, _, files in os.walk(directory):
        for name in files:
            yield os.path.relpath(os.path.join(here, name), environment)


def one_copy(environment, tree, own):
    """Remove installed copies of what the work tree has; return what is left of ``own``, with a path to the tree."""
    site = site_packages(environment)
    prefix = os.path.relpath(site, environment) + "/"
    roots, doomed = [], set()
    tops = sorted({name[len(prefix) :].split("/")[0] for name in own if name.startswith(prefix)})
    for top in tops:
        place = os.path.join(site, top)
        if top.endswith((".dist-info", ".egg-info", ".pth", ".egg-link")) or os.path.islink(place):
            continue
        holder, inside = site, [top]
        if top.endswith(".egg"):
            holder = opened_egg(place)
            inside = sorted(os.listdir(holder))
        homes = [home for home in SHADOWED for name in inside if is_code(os.path.join(tree, home, name), name)]
        if not homes:
            continue
        home = os.path.join(tree, homes[0]).rstrip("/")
        roots.append(home)
        for name in inside:
            bring_extensions(os.path.join(holder, name), os.path.join(home, name))
        if top.endswith(".egg"):
            information = top[: -len(".egg")] + ".egg-info"
            shutil.copytree(os.path.join(holder, "EGG-INFO"), os.path.join(site, information))
            own += [prefix + information + "/" + name for name in os.listdir(os.path.join(site, information))]
        doomed.update(name for name in own if name == prefix + top or name.startswith(prefix + top + "/"))
    if not roots:
        return own
    for name in doomed:
        os.unlink(os.path.join(environment, name))
    with open(os.path.join(site, LINK), "w", encoding="utf-8") as file:
        file.write("".join(root + "\n" for root in dict.fromkeys(roots)))
    left = {name for name in own if name not in doomed and not name.endswith("/easy-install.pth")}
    return sorted(left | {prefix + LINK})


def opened_egg(place):
    """Return an egg as a directory; one that is a zip archive is unpacked elsewhere."""
    if os.path.isdir(place):
        return place
    directory = tempfile.mkdtemp()
    with zipfile.ZipFile(place) as archive:
        archive.extractall(directory)
    return directory


def is_code(path, name):
    if name == "EGG-INFO" or name.startswith("__pycache__"):
        return False
    return (os.path.isfile(path) and name.endswith(".py")) or os.path.isfile(os.path.join(path, "__init__.py"))


def bring_extensions(installed, place):
    """Copy compiled modules of an installed copy to their place in the work tree, where they are missing."""
    if not os.path.isdir(installed) or not os.path.isdir(place):
        return
    for here, _, files in os.walk(installed):
        there = os.path.join(place, os.path.relpath(here, installed))
        for name in files:
            if name.endswith(".so") and os.path.isdir(there) and not os.path.exists(os.path.join(there, name)):
                shutil.copyfile(os.path.join(here, name), os.path.join(there, name))


def compile_all(environment, moment):
    """Write the byte code of what all instances share. It is root's later; 3.6 knows times only, which are all one."""
    python = os.path.join(environment, "bin/python")
    asked = subprocess.run([python, "-c", "import sys; print(sys.version_info[1])"], stdout=subprocess.PIPE, check=True)
    forms = ["--invalidation-mode", "unchecked-hash"] if int(asked.stdout) > 6 else []
    jobs = str(os.cpu_count() or 1)
    command = [python, "-m", "compileall", "-q", "-j", jobs, *forms, site_packages(environment)]
    # Some packages have files that do not compile, so the exit status says nothing.
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    settle(environment, moment)


def settle(environment, moment):
    for here, subdirectories, files in os.walk(environment, topdown=False):
        for name in subdirectories + files:
            os.utime(os.path.join(here, name), (moment, moment), follow_symlinks=False)
    os.utime(environment, (moment, moment))


def pack(archive, environment, names, moment):
    """Write files of an environment to a tar archive that is extracted at ``/``.

    All entries belong to root and have the time ``moment``. A file's mode becomes 755 if its owner may execute it,
    otherwise 644. A hard link becomes a file of its own.

    Args:
        archive: Path of the archive; a file there is replaced.
        environment: Absolute path of the environment.
        names: Files and symbolic links, relative to ``environment``.
        moment: Modification time, in seconds since 1970.
    """
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as opened:
        for name in names:
            path = os.path.join(environment, name)
            info = opened.gettarinfo(path, path.lstrip("/"))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = moment
            if info.islnk() or info.isreg():
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", os.path.getsize(path)
                info.mode = 0o755 if info.mode & 0o100 else 0o644
                with open(path, "rb") as file:
                    opened.addfile(info, file)
            else:
                opened.addfile(info)


sys.exit(main())
