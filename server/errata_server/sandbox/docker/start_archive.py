"""Makes the tar archive with the files of a `SandboxSpec` for a new container, and refuses what the image forbids."""

from __future__ import annotations

import io
import os
import posixpath
import tarfile
import time

from ..spec import Directory, File, SandboxSpec, SpecRefused, Symlink, check_workdir
from .program import encoded, quoted

AGENT_UID = 64000

_PROBE = rb"""
for path in "${paths[@]}"; do
  kind=- mode=755 owner=0 real=
  if [[ -d $path ]]; then kind=d; read -r mode owner < <(stat -L -c '%a %u' -- "$path"); real=$(readlink -f -- "$path")
  elif [[ -e $path || -L $path ]]; then kind=f; [[ -L $path ]] && real=$(readlink -m -- "$path")
  fi
  printf '%s\0%s\0%s\0%s\0' "$kind" "$mode" "$owner" "$real"
done
"""


def probe(spec: SandboxSpec) -> tuple[list[str], bytes]:
    """Return the paths about which `archive` needs information, and the input for `program.ARGV` that prints it."""
    wanted: dict[str, None] = {}
    for entry in (Directory(spec.workdir), *spec.entries):
        path = entry.path
        parts = []
        while path != "/":
            parts.append(path)
            path = posixpath.dirname(path)
        wanted.update((part, None) for part in reversed(parts))
    paths = list(wanted)
    text = b"paths=(" + b" ".join(quoted(encoded(path)) for path in paths) + b")\n" + _PROBE
    return paths, b"%d\n" % len(text) + text


def archive(spec: SandboxSpec, paths: list[str], answer: bytes) -> bytes:
    """Return a tar archive of the files of ``spec``.

    Args:
        spec: The spec.
        paths: The paths that `probe` returned.
        answer: The output of the program that `probe` returned.

    Raises:
        SpecRefused: The image has something else at the path of an entry, or the work directory cannot be one.
        ValueError: The answer is incomplete.
    """
    fields = answer.split(b"\0")[: 4 * len(paths)]
    if len(fields) < 4 * len(paths):
        raise ValueError("the program in the container did not print what the image has at the paths of the spec")
    known: dict[str, tuple[str, int, int, str]] = {}
    for index, path in enumerate(paths):
        kind, octal_mode, decimal_uid, real = fields[4 * index : 4 * index + 4]
        known[path] = (kind.decode(), int(octal_mode, 8), int(decimal_uid), os.fsdecode(real))
    check_workdir(known[spec.workdir][3] or spec.workdir)
    mtime = int(time.time()) if spec.mtime_s is None else spec.mtime_s
    made: dict[str, str] = {}
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as out:

        def add(path: str, kind: bytes, mode: int, uid: int, content: bytes = b"", target: str = "") -> None:
            member = tarfile.TarInfo(path.lstrip("/"))
            member.type, member.mode, member.uid, member.gid, member.mtime = kind, mode, uid, uid, mtime
            member.size, member.linkname = len(content), target
            out.addfile(member, io.BytesIO(content))

        for entry in (Directory(spec.workdir, owner="agent"), *spec.entries):
            _check(entry.path, known, made)
            parts = entry.path.split("/")
            for count in range(2, len(parts)):
                parent = "/".join(parts[:count])
                if made.get(parent) != "d" and known[parent][0] == "-":
                    add(parent, tarfile.DIRTYPE, 0o755, 0)
                    made[parent] = "d"
            in_image, mode, owner, _ = known[entry.path]
            current = made.get(entry.path, in_image)
            if isinstance(entry, Directory):
                if current == "f":
                    raise _refused(entry.path, "Not a directory")
                new_mode = (mode if in_image == "d" else 0o755) if entry.mode is None else entry.mode
                uid = {"agent": AGENT_UID, "root": 0, None: owner if in_image == "d" else 0}[entry.owner]
                add(entry.path, tarfile.DIRTYPE, new_mode & 0o1777, uid)
                made[entry.path] = "d"
                continue
            if current == "d":
                raise _refused(entry.path, "Is a directory")
            if isinstance(entry, File):
                uid = AGENT_UID if entry.owner == "agent" else 0
                add(entry.path, tarfile.REGTYPE, entry.mode, uid, entry.content)
            elif isinstance(entry, Symlink):
                add(entry.path, tarfile.SYMTYPE, 0o777, 0, target=entry.target)
            made[entry.path] = "f"
    return written.getvalue()


def _check(path: str, known: dict[str, tuple[str, int, int, str]], made: dict[str, str]) -> None:
    """Refuse a path that leads through a file, or through a symlink into /proc, /sys or /dev."""
    parts = path.split("/")
    for count in range(2, len(parts)):
        parent = "/".join(parts[:count])
        kind, _, _, real = known[parent]
        if made.get(parent, kind) == "f":
            raise _refused(path, "Not a directory")
        if real.startswith(("/proc", "/sys", "/dev")) and parent not in made:
            raise _refused(path, f"it leads to {real}, which belongs to the kernel")


def _refused(path: str, why: str) -> SpecRefused:
    return SpecRefused(f"entry {path}: {why}")
