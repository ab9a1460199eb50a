"""Distinguishes the agent's files from the server's, for commands that run on the server's machine
without a sandbox."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable

WORKSPACE_ROOTS = ("/workspace", "/testbed")
"""Where our environments put a task; another working directory is its own root."""

MAX_NAMES = 2_000
"""Names of the action, and paths of the output, that are compared."""

_NAME = re.compile(r"[\w./~+@%-]{2,400}")
_PATH = re.compile(
    r"""(?P<quote>["'`])(?P<quoted>(?:file://)?/[^"'`\n]{1,800})(?P=quote)"""
    r"""|(?:file://|(?<![\w.~/\\-])|(?<=\s-[A-Z]))(?P<bare>/[^\s"'`‘’“”:,;()<>\[\]{}|/]{1,255}(?:/[^\s"'`‘’“”:,;()<>\[\]{}|/]{1,255})+)"""
)
_OF_EVERY_SYSTEM = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/etc", "/dev", "/proc", "/sys", "/lib", "/lib64")
_SHARED = frozenset(
    [
        "",
        "/",
        "/etc",
        "/home",
        "/media",
        "/mnt",
        "/opt",
        "/root",
        "/run",
        "/srv",
        "/tmp",
        "/usr",
        "/usr/local",
        "/var",
        "/var/tmp",
    ]
)
"""Directories that hold more than one owner's files: one file of the agent says nothing of its neighbours there."""


class AgentFiles:
    """The agent's files, as far as the action and the output of one turn name them.

    An absolute path is the agent's if it is in a workspace, if the action names it, or if it is in the directory of
    a file that the action names or below it; but never if it is a file of the server. A relative path is the agent's
    unless the server has such a file. All other paths may be the server's, and are not used as sites.

    Args:
        action: Text of the action.
        output: What the command printed.
        is_host_file: Returns whether an absolute or relative path is a file of the server: of its interpreter, of an
            installed package, or of an environment's source.
    """

    def __init__(self, action: str, output: Iterable[str], is_host_file: Callable[[str], bool]) -> None:
        self._is_host_file = is_host_file
        self._names = {n.rstrip("/") or "/" for n in _NAME.findall(action)[:MAX_NAMES] if "." in n or "/" in n}
        self._roots = {*WORKSPACE_ROOTS}
        for name in self._names:
            if name.startswith("/"):
                self._add(posixpath.normpath(name))
        found = (match for line in output if "/" in line for match in _PATH.finditer(line))
        for _, match in zip(range(MAX_NAMES), found, strict=False):
            self._learn(_absolute(match["quoted"] or match["bare"]))

    def _learn(self, path: str) -> None:
        """Add the directory that a relative name in the action was resolved against, if ``path`` ends with
        that name."""
        if self._is_host_file(path):
            return
        for name in self._names:
            own = posixpath.normpath(name)
            if path == own:
                self._add(posixpath.dirname(path))
            elif not own.startswith((".", "/")) and path.endswith("/" + own):
                self._roots.add(path)
                self._add(path.removesuffix("/" + own))

    def _add(self, directory: str) -> None:
        if directory not in _SHARED:
            self._roots.add(directory)

    def owns(self, file: str) -> bool:
        """Return whether ``file``, as printed, is the agent's."""
        if file.startswith(("<", "[")):  # a name for code without a file
            return True
        path = file.removeprefix("file://")
        if self._is_host_file(path):
            return False
        return not path.startswith("/") or self.root(path) is not None

    def root(self, path: str) -> str | None:
        """Return the outermost of the agent's directories that contains an absolute path, None if none does."""
        path = posixpath.normpath(path)
        roots = (r for r in self._roots if path == r or path.startswith(r + "/"))
        return min(roots, key=len, default=None)

    def redacted(self, text: str) -> str:
        """Return ``text`` with ``.../NAME`` in place of each path that is neither the agent's nor the same on every
        system."""
        return _PATH.sub(self._shown, text)

    def _shown(self, match: re.Match[str]) -> str:
        quote, path = match["quote"] or "", _absolute(match["quoted"] or match["bare"])
        named = any(name == path or name.startswith(path + "/") for name in self._names)
        if named or (path.count("/") == 1 and quote):
            return match[0]
        if not self._is_host_file(path) and (self.root(path) is not None or _is_system_path(path)):
            return match[0]
        return f"{quote}.../{posixpath.basename(path)}{quote}"


def _absolute(path: str) -> str:
    return posixpath.normpath(path.removeprefix("file://"))


def _is_system_path(path: str) -> bool:
    return path.startswith(tuple(f"{root}/" for root in _OF_EVERY_SYSTEM))
