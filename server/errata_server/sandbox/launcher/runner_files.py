"""Reads or writes one file inside a sandbox as the agent's user, in a runner's child."""

# A fork copies the memory of what was imported, so no pathlib.
# ruff: noqa: PTH102

import ctypes
import os

from kernel import RESOLVE_NO_MAGICLINKS, SYS_OPENAT2, check, libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from messages import ReadRequest, WriteRequest

OVERLAYFS = 0x794C7630


def open_inside(path: bytes, flags: int, mode: int = 0) -> int:
    """Open a path that leads to the sandbox's own files, which are on overlayfs; return the descriptor.

    Raises:
        OSError: open(2) failed; EXDEV: the path leads to another file system, such as /proc or /dev.
    """
    how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC | os.O_NOCTTY, mode, RESOLVE_NO_MAGICLINKS)
    fd = check(
        libc.syscall(ctypes.c_long(SYS_OPENAT2), ctypes.c_long(-100), ctypes.c_char_p(path), how, ctypes.c_long(24)),
        "open",
    )
    file_system = (ctypes.c_long * 32)()  # struct statfs begins with the type
    check(libc.fstatfs(fd, file_system), "fstatfs")
    if file_system[0] != OVERLAYFS:
        os.close(fd)
        raise OSError(18, "not a file of the sandbox")
    return fd


def check_regular(fd: int) -> None:
    """Raise IsADirectoryError for a directory, and OSError (EINVAL) for anything else that is not a regular file."""
    kind = os.fstat(fd).st_mode & 0o170000
    if kind == 0o040000:
        raise IsADirectoryError(21, "directory")
    if kind != 0o100000:
        raise OSError(22, "not a regular file")


def read(request: "ReadRequest", data: int) -> tuple[str]:
    """Copy the file of a request to the descriptor ``data``; return the answer to the server.

    Raises:
        OSError: The file cannot be opened or read by the agent's user, or is not regular.
    """
    fd = open_inside(request["path"], os.O_RDONLY | os.O_NONBLOCK)
    check_regular(fd)
    left = request["max_bytes"]
    while left > 0 and (sent := os.sendfile(data, fd, None, min(left, 1 << 20))):
        left -= sent
    return ("done",)


def write(request: "WriteRequest", data: int) -> tuple[str]:
    """Replace the file of a request by the content of the descriptor ``data``; return the answer to the server.

    Parent directories are made as needed. ``mode`` of the request is applied to a file that exists already, too.

    Raises:
        OSError: The agent's user may not write there, or the path names something that is not a regular file.
    """
    path, at, refused = request["path"], 0, None
    while (at := path.find(b"/", at + 1)) != -1:
        try:
            os.mkdir(path[:at], 0o777)
        except FileExistsError:
            pass
        except OSError as error:
            refused = error
            break
    mode = request["mode"]
    flags = os.O_WRONLY | os.O_NONBLOCK
    try:
        fd = open_inside(path, flags | os.O_CREAT, 0o666 if mode is None else mode)
    except FileNotFoundError:
        raise refused or FileNotFoundError(2, "open") from None
    check_regular(fd)
    os.ftruncate(fd, 0)
    if mode is not None:
        os.fchmod(fd, mode)
    size, done = os.fstat(data).st_size, 0
    while done < size:
        done += os.sendfile(fd, data, done, min(size - done, 1 << 20))
    os.close(fd)
    return ("done",)
