"""Searches all files that the agent can read for lines of the fix: python search.py < request.

Runs inside, as the agent's user. The request is JSON: ``root``, the work tree; ``lines``, a list of [line, its words];
``skip``, directories that are not searched. What git tracks in the work tree is no place of the fix: a line that stands
there is none of the fix's. Archives and compressed files are opened. In byte code, a line is found by its words: those
of one line of the code hold them all. Prints JSON: [path, [number of a line, ...]] for each place that has any.
"""

import bz2
import dis
import io
import json
import lzma
import marshal
import os
import re
import subprocess
import sys
import types
import zipfile
import zlib
from importlib.util import MAGIC_NUMBER

WORD = re.compile(r"[^\W\d]\w+")
LARGEST = 256 * 1024**2
"""Bytes of a file, or of what one is decompressed to, that are searched."""
DEEPEST = 3
"""Archives in archives."""
STREAMS = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(31)),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ", lzma.LZMADecompressor),
)
BROKEN = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    RuntimeError,
    NotImplementedError,
    MemoryError,
)
BROKEN += (zlib.error, lzma.LZMAError, zipfile.BadZipFile, RecursionError, OverflowError, AttributeError)


def main():
    request = json.load(sys.stdin)
    texts = [line.encode("utf-8", "surrogateescape") for line, _ in request["lines"]]
    words = [frozenset(words) for _, words in request["lines"]]
    root = request["root"]
    tracked = set(tracked_files(root))
    for path in tracked:
        for _, data in contents(path, read(path)):
            # A line of the repository is no line of the fix.
            texts = [None if text is not None and text in data else text for text in texts]
    found, seen = [], set()
    for path in files({"/proc", "/sys", "/dev", *request["skip"]}):
        try:
            status = os.stat(path)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in seen or (path in tracked and not path.endswith(".pyc")):
            continue
        seen.add((status.st_dev, status.st_ino))
        for place, data in contents(path, read(path)):
            wanted = [index for index, text in enumerate(texts) if text is not None]
            if place.endswith((".pyc", ".pyo")):
                has = in_byte_code(data, {index: words[index] for index in wanted})
            else:
                has = [index for index in wanted if texts[index] in data]
            if has:
                found.append([place, has])
    print(json.dumps(found))


def tracked_files(root):
    """Return the files of the repository; without git, all files of the work tree."""
    try:
        listed = subprocess.run(
            ["git", "-C", root, "ls-files", "-z"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
        return [os.path.join(root, os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):
        return files({os.path.join(root, ".git")}, root)


def files(skip, root="/"):
    """Yield the paths of regular files."""
    for here, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(name for name in subdirectories if os.path.join(here, name) not in skip)
        for name in sorted(names):
            path = os.path.join(here, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield path


def read(path):
    """Return the bytes of a file, none for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(LARGEST)
    except OSError:
        return b""


def contents(path, data, depth=0):
    """Yield (place, bytes) of a file, and of what it is an archive of or compresses."""
    yield path, data
    if depth >= DEEPEST:
        return
    try:
        if data[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for member in archive.infolist():
                    if member.file_size <= LARGEST:
                        yield from contents(path + "!" + member.filename, archive.read(member), depth + 1)
        elif data[:1] == b"x" and os.path.basename(os.path.dirname(os.path.dirname(path))) == "objects":
            yield path, zlib.decompressobj().decompress(data, LARGEST)  # an object of a git repository
        for magic, decompressor in STREAMS:
            if data.startswith(magic):
                yield from contents(path, decompressor().decompress(data, LARGEST), depth + 1)
    except BROKEN:
        return


def in_byte_code(data, wanted):
    """Return the numbers of lines whose words one line of a module's code holds."""
    maybe = [index for index, words in wanted.items() if all(word.encode() in data for word in words)]
    if not maybe:
        return []
    try:
        if data[:4] != MAGIC_NUMBER:
            raise ValueError("of another Python")
        code = marshal.loads(data[16 if sys.version_info >= (3, 7) else 12 :])
    except BROKEN:
        return maybe if len(maybe) == len(wanted) else []  # a copy of the fix has all words of all its lines
    lines = {}
    collect_lines(code, lines)
    return [index for index in maybe if any(wanted[index] <= line for line in lines.values())]


def collect_lines(code, lines):
    """Add the words of a code object, and of those in it, to the sets of ``lines``, by the number of their line."""
    starts, number = dict(dis.findlinestarts(code)), None
    for step in dis.get_instructions(code):
        number = starts.get(step.offset, number)
        if isinstance(step.argval, str) and "\n" in step.argval:
            lines.update(((number, at), words_of(text)) for at, text in enumerate(step.argval.split("\n")))
        else:
            lines.setdefault(number, set()).update(words_of(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            collect_lines(constant, lines)


def words_of(value):
    """Return the words of an operand: a name, a constant, or what a function is made of."""
    if isinstance(value, types.CodeType):
        return {value.co_name, *value.co_varnames[: value.co_argcount + value.co_kwonlyargcount + 2]}
    if isinstance(value, (tuple, frozenset)):
        return set().union(*map(words_of, value)) if value else set()
    return set(WORD.findall(value)) if isinstance(value, str) else set()


if __name__ == "__main__":
    main()
