"""The program that runs a command in a container: a bash script; an image needs bash, coreutils and findutils.

An exec request of the engine starts it as the agent. It reads its own text from standard input, so that a command may
have any bytes, runs the command's bash as a child, kills the processes that it leaves, and writes a report at the end
of standard error. It reads as many bytes as its input says that there are and never waits for the end of the stream,
which an engine may lose (seen with Docker 20.10 on a loaded machine).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from ..base import Limits
from ..shell_state import MAX_STATE_BYTES, STATE_FD

ARGV = (
    *("/usr/bin/env", "-i", "/bin/bash", "--norc", "--noprofile", "-c"),
    'LC_ALL=C; IFS= read -r n && script=$(head -c "$n"; echo .) && eval "${script%.}"',
)
REPORT_BYTES = MAX_STATE_BYTES + 32 * 1024
"""Most bytes of a report; so much of the end of standard error is searched for it."""

_COMMON = r"""
exec 9>&2 2>/dev/null
report() {
  local oom=0 max=0 key value file
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [[ -r $file ]] && while read -r key value; do [[ $key == oom_kill ]] && oom=$value; done <"$file"
  done
  for file in /sys/fs/cgroup/pids.events /sys/fs/cgroup/pids/pids.events; do
    [[ -r $file ]] && while read -r key value; do [[ $key == max ]] && max=$value; done <"$file"
  done
  printf '%s%s\0%s\0%s\0' "$nonce" "$status" "$oom" "$max"
  printf '%s\0' "${left[@]}" ''
}
others() {
  local place stat name
  names=()
  for place in /proc/[0-9]*; do
    [[ $place == /proc/1 || $place == "/proc/$$" ]] && continue
    stat= name=
    IFS= read -r -d '' stat <"$place/stat"
    [[ $stat && ${stat##*) } != [ZX]* ]] || continue
    IFS= read -r -d '' name <"$place/comm"
    names+=("${name%$'\n'}")
  done
  ((${#names[@]}))
}
kill_others() {
  others || return 0
  left=("${names[@]:0:64}")
  local until=$((SECONDS + 4))
  while ((SECONDS < until)); do
    kill -9 -1
    others || break
  done
}
"""

_RUN = r"""
place=/dev/shm/.errata-$$
umask 077
: >"$place.state" && exec 254>>"$place.state" 253<"$place.state" && printf %s "$startup" >&254
if ((stdin_bytes)); then head -c "$stdin_bytes" >"$place.stdin" && exec 8<"$place.stdin"; else exec 8</dev/null; fi
rm -f "$place".*
umask 022
(
  why=$(cd -- "$cwd" 2>&1) && cd -- "$cwd" || { printf '/bin/bash: cd: %s: %s\n' "$cwd" "${why##*: }" >&2; cd /; }
  set_limits
  exec /usr/bin/env -i "${environment[@]}" /bin/bash -c "$command"
) <&8 2>&9 8<&- 9>&- 253<&-
status=$?
left=()
kill_others
[[ $(echo /dev/shm/* /dev/shm/.[!.]*) == '/dev/shm/* /dev/shm/.[!.]*' ]] || find /dev/shm -mindepth 1 -delete
{ report; { head -c "$skip" >/dev/null; head -c "$most"; } <&253; } >&9
exit "$status"
"""

_CLEAN_UP = r"""
status=0 left=()
kill_others
report >&9
"""

_READ = r"""
exec 9>&2
at= rest=$path links=0
while :; do
  while [[ $rest == /* ]]; do rest=${rest#/}; done
  [[ $rest ]] || break
  part=${rest%%/*} rest=${rest#"${rest%%/*}"}
  [[ $part == . ]] && continue
  [[ $part == .. ]] && { at=${at%/*}; continue; }
  at=$at/$part
  case $at/ in /proc/* | /sys/* | /dev/*) echo EACCES >&9; exit 9 ;; esac
  [[ -L $at ]] || continue
  ((++links > 40)) && { echo ELOOP >&9; exit 9; }
  target=$(readlink -n -- "$at"; echo .)
  rest=/${target%.}$rest
  if [[ $target == /* ]]; then at=; else at=${at%/*}; fi
done
at=${at:-/}
[[ -d $at ]] && { echo EISDIR >&9; exit 9; }
[[ -e $at && ! -f $at ]] && { echo EINVAL >&9; exit 9; }
fail() { printf '%s\n' "${1##*: }" >&9; exit 9; }
"""
_DO_READ = r"""
why=$(exec 2>&1; : <"$at") || fail "$why"
exec head -c "$most" -- "$at"
"""
_DO_WRITE = r"""
umask 022
if ! why=$( { : >>"$at"; } 2>&1 ); then
  [[ $why == *'No such file'* ]] || fail "$why"
  made=$(mkdir -p -- "${path%/*}/" 2>&1) || fail "$made"
  why=$( { : >>"$at"; } 2>&1 ) || fail "$why"
fi
why=$( { head -c "$size" >"$at"; } 2>&1 ) || fail "$why"
if [[ $mode ]]; then why=$(chmod "$mode" -- "$at" 2>&1) || fail "$why"; fi
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The program's report on a command, written at the end of standard error.

    Args:
        status: The shell's exit status.
        oom_kills: Processes that the kernel killed at the memory limit since the container was started.
        pids_refused: Forks that failed at the limit of processes since then.
        left: Names of processes that were still running after the command, and were killed.
        state: The shell state that was saved.
    """

    status: int
    oom_kills: int
    pids_refused: int
    left: tuple[str, ...]
    state: bytes


def nonce() -> bytes:
    """Return a random mark with which the report of one command begins; its output cannot contain it by chance."""
    return b"\nerrata-report-" + secrets.token_hex(16).encode() + b":"


def run(
    command: bytes,
    *,
    startup: bytes,
    environment: Mapping[bytes, bytes],
    cwd: bytes,
    limits: Limits,
    mark: bytes,
    stdin: bytes | None,
) -> bytes:
    """Return the standard input with which `ARGV` runs a command.

    Args:
        command: The command.
        startup: Shell text that bash reads before it; empty for none, and then no state is saved.
        environment: All environment variables.
        cwd: Working directory; ``/`` if it cannot be entered, after a message on standard error.
        limits: Resource limits.
        mark: Beginning of the report; see `nonce`.
        stdin: Standard input of the command; None for an empty one.
    """
    variables = b" ".join(quoted(name + b"=" + value) for name, value in environment.items())
    bounds = (
        "ulimit -c 0",
        f"ulimit -f {max(1, limits.file_size_bytes // 1024)}",
        f"ulimit -S -t {limits.cpu_s}; ulimit -H -t {limits.cpu_s + 2}",
        f"ulimit -n {limits.open_files}",
    )
    text = b"\n".join(
        (
            b"nonce=" + quoted(mark),
            b"startup=" + quoted(startup),
            b"command=" + quoted(command),
            b"cwd=" + quoted(cwd),
            b"environment=(" + variables + b")",
            b"stdin_bytes=%d skip=%d" % (len(stdin or b""), len(startup)),
            b"most=%d" % (MAX_STATE_BYTES + 65 if startup else 0),
            b"set_limits() { " + "; ".join(bounds).encode() + b"; }",
            _COMMON.encode(),
            _RUN.encode(),
        )
    )
    return b"%d\n" % len(text) + text + (stdin or b"")


def clean_up(mark: bytes) -> bytes:
    """Return the standard input with which `ARGV` kills the processes of a command whose own program was killed."""
    text = b"nonce=" + quoted(mark) + b"\n" + _COMMON.encode() + _CLEAN_UP.encode()
    return b"%d\n" % len(text) + text


def read(path: bytes, most: int) -> bytes:
    """Return the standard input with which `ARGV` prints the first ``most`` bytes of a file.

    If the file is refused the exit status is 9, and standard error has the name or text of an errno.
    """
    text = b"path=" + quoted(path) + b" most=%d\n" % most + _READ.encode() + _DO_READ.encode()
    return b"%d\n" % len(text) + text


def write(path: bytes, data: bytes, mode: int | None) -> bytes:
    """Return the standard input with which `ARGV` writes a file and makes its missing parent directories.

    If the file is refused the exit status is 9, and standard error has the name or text of an errno.
    """
    mode_text = b"" if mode is None else b"%o" % mode
    head = b"path=" + quoted(path) + b" size=%d mode=%s\n" % (len(data), mode_text)
    text = head + _READ.encode() + _DO_WRITE.encode()
    return b"%d\n" % len(text) + text + data


def parse_report(data: bytes, mark: bytes) -> tuple[bytes, Report | None]:
    """Split the end of standard error into the command's own bytes and the report.

    The report is None if the program was killed before it wrote one, or if it is malformed.
    """
    own, found, report = data.rpartition(mark)
    if not found:
        return data, None
    try:
        status, oom, refused, rest = report.split(b"\0", 3)
        names = []
        while True:
            name, rest = rest.split(b"\0", 1)
            if not name:
                break
            names.append(name.decode("utf-8", "backslashreplace"))
        return own, Report(int(status), int(oom), int(refused), tuple(names), rest)
    except ValueError:  # written by the agent, or incomplete
        return own, None


def quoted(data: bytes) -> bytes:
    """Return bytes quoted as one word for bash."""
    return b"'" + data.replace(b"'", b"'\"'\"'") + b"'"


STATE_VARIABLE = (b"BASH_ENV", b"/proc/self/fd/%d" % STATE_FD)
DEFAULT_HOME = "/home/agent"


def encoded(text: str) -> bytes:
    """Return text as the bytes for system calls; surrogates that stand for no byte are encoded as such."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
