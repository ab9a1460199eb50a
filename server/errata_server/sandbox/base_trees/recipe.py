"""What goes into a base tree: the packages, and what is done to them before a tree is published.

The tree is what every sandbox sees below its own layers, so it holds nothing of the host (no resolver, host name,
mirror address or machine id), nothing that gives privileges (no set-uid bit, no file capability, no device node) and
nothing the agent may write except its own directories.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

AGENT_USER = "agent"
AGENT_UID = 64000
"""uid and gid of the agent; far above what distributions hand out, and below 65534 (nobody)."""

AGENT_DIRECTORIES = ("workspace", "home/agent")
"""Owned by the agent, beside the world-writable /tmp and /var/tmp."""

WORLD_WRITABLE = ("tmp", "var/tmp")

PACKAGES = (
    *("bash", "coreutils", "findutils", "diffutils", "grep", "sed", "gawk", "perl", "bc", "jq", "ripgrep"),
    *("tar", "gzip", "bzip2", "xz-utils", "zip", "unzip", "file", "less", "tree", "procps", "netbase", "curl"),
    *("python3", "python-is-python3", "python3-pytest", "sqlite3"),
    *("git", "patch", "make", "gcc", "libc6-dev"),
)
"""Tools coding agents use, above debootstrap's minbase. No node, no CA certificates: sandboxes have no network."""

VERIFIER_DIRECTORY = "usr/lib/errata-verifier"
"""Where `VERIFIER_PACKAGES` lie: on no path of the agent's, so that its own pytest stays the distribution's."""

VERIFIER_PACKAGES = (
    ("certifi", "2025.8.3", "f6c12493cfb1b06ba2ff328595af9350c65d6644968e5d3a2ffd78699af217a5"),
    ("charset-normalizer", "3.4.3", "ce571ab16d890d23b5c278547ba694193a45011ff86a9162a71307ed9f86759a"),
    ("idna", "3.10", "946d195a0d259cbba61165e88e65941f16e9b36ea6ddb97f00452bae8b1287d3"),
    ("iniconfig", "2.1.0", "9deba5723312380e77435581c6bf4935c94cbfab9b1ed33ef8d238ea168eb760"),
    ("packaging", "25.0", "29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484"),
    ("pexpect", "4.9.0", "7236d1e080e4936be2dc3e326cec0af72acf9212a7e1d060210e70a47e253523"),
    ("pluggy", "1.6.0", "e920276dd6813095e9377c0bc5566d94c932c33b27a3e3945d8389c374dd4746"),
    ("ptyprocess", "0.7.0", "4b41f3967fce3af57cc7e94b888626c18bf37a083e3651ca8feeb66d492fef35"),
    ("pygments", "2.19.2", "86540386c03d588bb81d44bc3928634ff26449851e99741617ecb9037ee5ec0b"),
    ("pytest", "8.4.1", "539c70ba6fcead8e78eebbf1115e8b589e7565830d7d006a8723f19ac8a0afb7"),
    ("pytest-json-ctrf", "0.3.5", "e82fd1d69be2f92385bc33540063e5ad7b17b36de67764c84f3ceb9815a895e9"),
    ("pytest-timeout", "2.4.0", "c42667e5cdadb151aeb5b26d114aff6bdf5a907f176a007a30b940d3d865b5c2"),
    ("requests", "2.32.4", "27babd3cda2a6d50b30443204ee89830707d396671944c998b5975b031ac2b2c"),
    ("urllib3", "2.5.0", "e6b01673c0fa6a13e374b50871808eb3bf7046c4b125b216f6bf1cc604cff0dc"),
)
"""What graders of terminal-bench's kind ask of PyPI, as (name, version, sha256 of the wheel); pure Python."""

_EMPTIED = ("dev", "proc", "sys", "run", "tmp", "var/tmp", "var/lib/apt/lists", "var/cache/apt", "var/log")
_REMOVED = (
    *("usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/gtk-doc"),
    *("var/cache/debconf", "var/lib/dpkg/info/*.md5sums", "var/lib/dbus/machine-id", "etc/*-", "debootstrap"),
)
_FILES = {
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n",
    "etc/resolv.conf": "",
    "etc/machine-id": "",
    "etc/apt/sources.list": "",
    # One user only, so files that a task placed under another uid are not a danger: git's "dubious ownership" would
    # be an error no agent made. An identity is not set on purpose: real machines have none either.
    "etc/gitconfig": "[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n",
}


def recipe_digest() -> str:
    """Return a short digest of this recipe; it changes whenever a tree built from it would."""
    return hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:16]


def prepare(root: Path) -> None:
    """Turn a freshly bootstrapped system into a base tree, in place.

    Args:
        root: Root directory of the system; nothing may be mounted below it.
    """
    for name in _EMPTIED:
        _empty(root / name)
    for pattern in _REMOVED:
        for path in root.glob(pattern):
            _remove(path)
    for path in (root / "usr/share/doc").glob("*/*"):
        if path.name != "copyright":
            _remove(path)
    for name, content in _FILES.items():
        _remove(root / name)  # never through a link of the tree into the host
        (root / name).write_text(content, encoding="utf-8")
        (root / name).chmod(0o644)
    _add_agent(root)
    for path in _walk(root):
        _take_privileges(path)
    for name in WORLD_WRITABLE:
        (root / name).chmod(0o1777)


def content_digest(root: Path) -> str:
    """Return the hex sha256 of a tree: paths, types, modes, owners, link targets and file contents, not times."""
    total = hashlib.sha256()
    for path in _walk(root):
        status = path.lstat()
        total.update(os.fsencode(path.relative_to(root)) + b"\0")
        total.update(b"%o %d %d " % (status.st_mode, status.st_uid, status.st_gid))
        if stat.S_ISREG(status.st_mode):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        elif stat.S_ISLNK(status.st_mode):
            total.update(os.fsencode(path.readlink()))
        total.update(b"\0")
    return total.hexdigest()


def _walk(root: Path) -> Iterator[Path]:
    """Yield everything below ``root`` in a fixed order, following no link."""
    for directory, subdirectories, files in os.walk(root):
        subdirectories.sort()
        for name in sorted([*subdirectories, *files]):
            yield Path(directory, name)


def _add_agent(root: Path) -> None:
    lines = {
        "etc/passwd": f"{AGENT_USER}:x:{AGENT_UID}:{AGENT_UID}::/home/{AGENT_USER}:/bin/bash\n",
        "etc/group": f"{AGENT_USER}:x:{AGENT_UID}:\n",
        "etc/shadow": f"{AGENT_USER}:*:19000:0:99999:7:::\n",
        "etc/gshadow": f"{AGENT_USER}:*::\n",
    }
    for name, line in lines.items():
        with (root / name).open("a", encoding="utf-8") as file:
            file.write(line)
    for name in AGENT_DIRECTORIES:
        directory = root / name
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.chmod(0o755)
        os.chown(directory, AGENT_UID, AGENT_UID)
    for skeleton in (root / "etc/skel").iterdir():
        if skeleton.is_file() and not skeleton.is_symlink():
            copy = root / "home" / AGENT_USER / skeleton.name
            shutil.copyfile(skeleton, copy)
            copy.chmod(0o644)
            os.chown(copy, AGENT_UID, AGENT_UID)


def _take_privileges(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        path.unlink()  # devices, sockets and pipes
        return
    wanted = stat.S_IMODE(status.st_mode) & ~(stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH)
    if wanted != stat.S_IMODE(status.st_mode):
        path.chmod(wanted)
    if "security.capability" in os.listxattr(path, follow_symlinks=False):
        os.removexattr(path, "security.capability", follow_symlinks=False)


def _empty(directory: Path) -> None:
    if directory.is_dir() and not directory.is_symlink():
        for entry in directory.iterdir():
            _remove(entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
