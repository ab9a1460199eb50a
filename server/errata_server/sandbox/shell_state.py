"""The shell's state between two commands: cwd, exported variables, functions, aliases, options, umask.

Each command runs in a new ``bash -c``, so its messages are bash's own (``/bin/bash: line 1: ...``). The state is passed
in a memory file, which the command has open as descriptor `STATE_FD`:

    BASH_ENV names it, so bash reads it before the command: a prologue that sets an EXIT trap, then the saved state.
    The trap appends the new state: cwd, options and the rest, each ended by NUL, and an end mark.

The server reads what was appended and interprets only the cwd. The agent's processes inherit the descriptor: a process
that writes a false state affects its own sandbox only, where it could run the same commands anyway.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from .spec import WORKSPACE

STATE_FD = 254
MAX_STATE_BYTES = 32 * 1024
_END = b"\0end\n"

# The trap calls a function with its output redirected, because it runs under the options that the command set: xtrace
# would print the trap's commands, errexit and nounset would end it.
_PROLOGUE = r"""
builtin unset BASH_ENV
builtin eval "__errata_save() {
  builtin local __errata_status=\$?
  builtin pwd
  builtin printf '\\0'
  [[ \$SHELLOPTS:\$BASHOPTS == '$SHELLOPTS:$BASHOPTS' ]] || { builtin set +o; builtin shopt -p; }
  builtin set +euxv
  builtin printf '\\0'
  builtin unset -f __errata_save trap
  if builtin declare -F __errata_env; then __errata_env; builtin unset -f __errata_env; fi >/dev/null
  builtin unset SHLVL _
  builtin export -n PWD
  builtin umask -p
  builtin alias -p
  builtin declare -px
  builtin declare -f
  builtin declare -Fx
  builtin printf '\\0end\\n'
  builtin return \$__errata_status
} >&254"
builtin trap '{ __errata_save; } 2>/dev/null' EXIT
"""

# Only for a command that sets an EXIT trap, which would replace the prologue's: saves the state, then runs that trap.
_TRAP_WRAPPER = r"""
trap() {
  builtin trap "$@" || builtin return
  [[ $BASHPID == "$$" && " $* " =~ \ (EXIT|0)\  ]] || builtin return 0
  builtin local __errata_trap
  __errata_trap=$(builtin trap -p EXIT)
  [[ $__errata_trap ]] || { builtin trap '{ __errata_save; } 2>/dev/null' EXIT; builtin return 0; }
  builtin eval "builtin set -- $__errata_trap"
  builtin trap "( __errata_save ) 2>/dev/null"$'\n'"$3" EXIT
}
"""
_TRAP = re.compile(rb"\btrap\b")
_EXIT = re.compile(rb"\bEXIT\b|\s0\b")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class ShellState:
    """The shell state that a command left for the next one.

    Args:
        cwd: Working directory, as the bytes that the kernel has.
        options: Shell text that sets the shell options; empty for bash's defaults.
        script: Shell text that sets everything else.
    """

    cwd: bytes = WORKSPACE.encode()
    options: bytes = b""
    script: bytes = b""

    @property
    def pristine(self) -> bool:
        """Whether no state was saved yet, so that the backend supplies the variables."""
        return not self.script

    @classmethod
    def starting(cls, workdir: str, env: Mapping[str, str], defaults: Mapping[str, str]) -> ShellState:
        """Return the state for the first command of a sandbox.

        Args:
            workdir: Working directory.
            env: Variables to export, which override those of ``defaults``. Without any the state is pristine.
            defaults: The backend's own variables.
        """
        lines = [f"builtin declare -x {name}={shlex.quote(value)}\n" for name, value in {**defaults, **env}.items()]
        script = "".join(lines) if env else ""
        return cls(os.fsencode(workdir), script=script.encode("utf-8", "surrogateescape"))

    def pack(self) -> bytes:
        """Return the bytes that `unpack` reads; empty for a pristine state in `WORKSPACE`."""
        if self == ShellState():
            return b""
        return b"\0".join((self.cwd, self.options, self.script))

    @classmethod
    def unpack(cls, data: bytes, workdir: str = WORKSPACE) -> ShellState:
        """Return the state that `pack` wrote.

        Args:
            data: The bytes; empty for a pristine state.
            workdir: Working directory of a pristine state.

        Raises:
            ValueError: ``data`` is not such a state.
        """
        if not data:
            return cls(os.fsencode(workdir))
        cwd, options, script = data.split(b"\0")
        return cls(cwd, options, script)


def startup(state: ShellState, command: bytes, env: Mapping[str, str]) -> bytes:
    """Return the shell text that bash reads before a command, which restores the state and arranges to save it.

    Args:
        state: The state after the last command.
        command: The command, which is searched for an EXIT trap of its own.
        env: Variables for this command only; the saved state keeps their earlier values.

    Raises:
        ValueError: A name in ``env`` is not a valid name of a shell variable.
    """
    parts = [_PROLOGUE.encode()]
    if not state.pristine:
        parts += [b"{\n", state.script, b"\n} 2>/dev/null\n"]
    if env:
        keep = "".join(f"${{{name}+builtin export {name}=${{{name}@Q}};}}" for name in env)
        parts.append(f'builtin eval "__errata_env() {{ builtin unset {" ".join(env)}; {keep} }}"\n'.encode())
        for name, value in env.items():
            if not _NAME.match(name):
                raise ValueError(f"{name!r} is not a valid name of a shell variable")
            parts.append(f"builtin export {name}={shlex.quote(value)}\n".encode("utf-8", "surrogateescape"))
    if any(_sets_exit_trap(line) for line in command.split(b"\n")):
        parts.append(_TRAP_WRAPPER.encode())
    if state.options:
        # Last, because errexit or noexec would stop the rest and xtrace would show it.
        parts += [b"{\n", state.options, b"\n} 2>/dev/null\n"]
    return b"".join(parts)


def _sets_exit_trap(line: bytes) -> bool:
    found = _TRAP.search(line)  # the first is enough, and keeps this linear
    return found is not None and _EXIT.search(line, found.end()) is not None


def saved(data: bytes) -> ShellState | None:
    """Return the state that a command appended; None if there is none, or it is incomplete, malformed or too large.

    Args:
        data: What follows the startup text in the memory file: all of it, or the first `MAX_STATE_BYTES` + 1 bytes.
    """
    if len(data) > MAX_STATE_BYTES or not data.endswith(_END):
        return None
    sections = data.removesuffix(_END).split(b"\0")
    if len(sections) != 3 or not sections[0].startswith(b"/") or not sections[2]:
        return None
    return ShellState(sections[0].removesuffix(b"\n"), sections[1], sections[2])
