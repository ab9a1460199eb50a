"""Searches all files that the agent can read for lines of the fix: python search.py < request.

Runs inside, as the agent's user. The request is JSON: ``root``, the work tree; ``lines``, a list of [line, its words];
``skip``, directories that are not searched; ``sites``, names of directories that packages are installed in;
``holders``, these and those that a package has copies of others in. What git tracks in the work tree is no place of the
fix: a line that stands there is none of the fix's. Archives and compressed files are opened. In byte code, a line is
found by its words: those of one line of the code hold them all. Prints JSON: [path, [number of a line, ...]] for each
place that has more than can be there by chance (`tells`).
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

PYTHON = re.compile(r"/lib/python3(\.\d+)?/")
WORD = re.compile(r"[^\W\d]\w+")
LARGEST = 256 * 1024**2
"""Bytes of a file, or of what one is decompressed to, that are searched."""
TOGETHER, ALONE, ONLY = 6, 8, 5
"""So many different words have to be in the lines of the fix that a place has: in two or more; in one of several lines;
in the only one that there is."""
COMMON = 2
"""A line in files of so many packages is an idiom."""
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
            if is_byte_code(place):
                has = in_byte_code(data, {index: words[index] for index in wanted})
            else:
                has = [index for index in wanted if texts[index] in data]
            if has:
                found.append([place, has])
    total = sum(text is not None for text in texts)
    idioms = common_lines(found, request["sites"], request["holders"])
    print(json.dumps([[place, has] for place, has in found if tells(place, has, words, total, idioms)]))


def is_byte_code(place):
    """Return whether a place is a file of byte code."""
    return place.endswith((".pyc", ".pyo"))


def tells(place, has, words, total, idioms):
    """Return whether the lines in a place can hardly be there by chance.

    Idioms count only together with all other lines of the fix. Byte code does not show how words are combined, so it
    has to have half of the lines.

    Args:
        place: The place.
        has: Numbers of the fix's lines that are in the place.
        words: Words of each line of the fix, by its number.
        total: Number of lines of the fix, those that stand in the repository left out.
        idioms: Numbers of the lines that are idioms.
    """
    if is_byte_code(place) and (2 * len(has) < total or count(has, words) < TOGETHER):
        return False
    if len(has) == total > 1 and count(has, words) >= ALONE:
        return True
    own = [index for index in has if index not in idioms]
    least = TOGETHER if len(own) > 1 else ONLY if total == 1 else ALONE
    return bool(own) and count(own, words) >= least


def count(lines, words):
    """Return how many different words lines have together."""
    return len(set().union(*(words[index] for index in lines)))


def common_lines(found, sites, holders):
    """Return the numbers of the lines that stand in files of several packages; byte code shows no line.

    Args:
        found: [path, [number of a line, ...]] for each place that has any.
        sites: Names of directories that packages are installed in.
        holders: These, and names of directories that a package has copies of others in.
    """
    packages = {}
    for place, has in found:
        package = None if is_byte_code(place) else package_of(place, sites, holders)
        for index in has if package else ():
            packages.setdefault(index, set()).add(package)
    return {index for index, names in packages.items() if len(names) >= COMMON}


def package_of(place, sites, holders):
    """Return the package that an installed file is of, wherever it was copied to; "" for a file that is of none.

    Python's own modules are one package.
    """
    parts = place.replace("!", "/").split("/")
    if not set(sites).intersection(parts[:-1]):
        return "python" if PYTHON.search(place) else ""
    last = max(index for index, part in enumerate(parts[:-1]) if part in holders)
    return re.split(r"[.-]", parts[last + 1])[0].strip("_").lower()


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
