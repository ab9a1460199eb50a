"""The shell's state between two commands: cwd, exported variables, functions, aliases, options, umask.

Each command is a fresh ``bash -c``, so that its messages are bash's own (``/bin/bash: line 1: ...``). What it leaves is
carried by one memory file of the command, on descriptor `STATE_FD`:

    BASH_ENV names it, so bash reads it before the command: a prologue that sets an EXIT trap, then the saved state.
    The trap appends the new state behind it, in three NUL-ended sections and an end mark.

The server reads what was appended but never interprets more than the cwd. The descriptor is inherited by the agent's
processes: one that forges a state changes its own sandbox, where it could have run the same commands anyway.
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

# In a function, because a trap runs under the options the command left: xtrace would print the trap's commands (hence
# the redirection around the call), errexit and nounset would end it.
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

# Only for a command that sets an EXIT trap itself, which would replace ours: save first, then run the agent's.
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
    """What one command left for the next.

    Args:
        cwd: Working directory, bytes as the kernel knows it.
        options: Script that sets the options; empty when they are bash's own.
        script: Script that sets everything else.
    """

    cwd: bytes = WORKSPACE.encode()
    options: bytes = b""
    script: bytes = b""

    @property
    def pristine(self) -> bool:
        """No command has left anything yet: variables come from the backend."""
        return not self.script

    @classmethod
    def starting(cls, workdir: str, env: Mapping[str, str], defaults: Mapping[str, str]) -> ShellState:
        """Return the state that the first command of a sandbox finds.

        Args:
            workdir: Where it runs.
            env: Variables that it finds besides and over ``defaults``; with none the state is pristine.
            defaults: The backend's own.
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
            workdir: Where a pristine state is.

        Raises:
            ValueError: ``data`` is not such a state.
        """
        if not data:
            return cls(os.fsencode(workdir))
        cwd, options, script = data.split(b"\0")
        return cls(cwd, options, script)


def startup(state: ShellState, command: bytes, env: Mapping[str, str]) -> bytes:
    """Return what bash reads before ``command``.

    Args:
        state: What the last command left.
        command: The command, to know whether it sets an EXIT trap.
        env: Variables for this command only.

    Raises:
        ValueError: A name in ``env`` is not a shell variable's.
    """
    parts = [_PROLOGUE.encode()]
    if not state.pristine:
        parts += [b"{\n", state.script, b"\n} 2>/dev/null\n"]
    if env:
        keep = "".join(f"${{{name}+builtin export {name}=${{{name}@Q}};}}" for name in env)
        parts.append(f'builtin eval "__errata_env() {{ builtin unset {" ".join(env)}; {keep} }}"\n'.encode())
        for name, value in env.items():
            if not _NAME.match(name):
                raise ValueError(f"{name!r} is no name of a shell variable")
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
    """Return the state a command appended, None if it left none that counts: cut short, too large or not ours.

    Args:
        data: What stands behind the startup text, at least `MAX_STATE_BYTES` + 1 bytes of it.
    """
    if len(data) > MAX_STATE_BYTES or not data.endswith(_END):
        return None
    sections = data.removesuffix(_END).split(b"\0")
    if len(sections) != 3 or not sections[0].startswith(b"/") or not sections[2]:
        return None
    return ShellState(sections[0].removesuffix(b"\n"), sections[1], sections[2])
