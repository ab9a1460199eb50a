"""A command behaves as in a plain ``bash -c``, and what it leaves in the shell is there for the next one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from errata_server.sandbox import shell_state
from errata_server.sandbox.namespace.backend import NamespaceBackend
from errata_server.sandbox.shell_state import ShellState

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
COMMANDS = [
    "foo",
    "true\n\nfoo",
    "if",
    "echo a\nif then",
    "cd /tmp; exit 3",
    "set -e; false; echo no",
    "echo $LINENO; cat nope",
    "set -x\necho hi",
    "f() { foo; }; f",
    'echo "a',
    "cat <<E\nabc",
    "set -u; echo $zz",
    "echo ${x?bad}",
    "((1/0))",
    "kill -9 $$",
    'trap "echo bye" EXIT; echo x',
    'trap "echo bye; exit 4" EXIT; echo x; exit 9',
    '(trap "echo sub" EXIT; true); echo main',
    "trap 'echo t' TERM; kill -TERM $$; echo after",
    "readonly a=1; a=2; echo x",
    "./nope",
    "return 3",
    "let 1+",
    "exec true",
    "(exit 4)",
    "env | sort",
    "echo $SHLVL $0 $# $-",
    "sleep 0 | foo",
    "eval foo",
    ". /nofile",
    "a=(1 2",
    "echo $(foo)",
]


PRISTINE = ShellState()


def run(command: str, state: ShellState = PRISTINE) -> tuple[subprocess.CompletedProcess[bytes], ShellState | None]:
    """Run ``command`` on the host the way a sandbox would."""
    startup = shell_state.startup(state, command.encode(), {})
    memory = os.memfd_create("state")
    os.write(memory, startup)
    append = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_APPEND)
    environment = (ENVIRONMENT if state.pristine else {}) | {"BASH_ENV": f"/proc/self/fd/{shell_state.STATE_FD}"}

    def take_descriptor() -> None:
        os.dup2(append, shell_state.STATE_FD)

    try:
        result = subprocess.run(
            ["/bin/bash", "-c", command],
            env=environment,
            cwd="/" if state.pristine else os.fsdecode(state.cwd),
            capture_output=True,
            preexec_fn=take_descriptor,
            close_fds=False,
            check=False,
        )
        return result, shell_state.saved(os.pread(memory, shell_state.MAX_STATE_BYTES + 64, len(startup)))
    finally:
        os.close(memory)
        os.close(append)


@pytest.mark.parametrize("command", COMMANDS)
def test_output_and_status_are_those_of_plain_bash(command: str) -> None:
    plain = subprocess.run(["/bin/bash", "-c", command], env=ENVIRONMENT, cwd="/", capture_output=True, check=False)
    ours, _ = run(command)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_variables_functions_aliases_options_umask_and_cwd_are_restored() -> None:
    command = (
        "export A=$'x\\ny\\'z'; export -n HOME; f() { cat <<E\nhere $1\nE\n}; export -f f; alias q=ls\n"
        "umask 077; shopt -s extglob nullglob; set -o pipefail; declare -rx R=1; unset LANG; cd /usr; plain=1"
    )
    _, state = run(command)
    assert state is not None
    result, again = run(
        'echo "$A|$R|$plain|"; f 1; bash -c "f 2"; alias; umask; pwd; shopt -q extglob nullglob && set -o | grep pipef',
        state,
    )
    expected = b"x\ny'z|1||\nhere 1\nhere 2\nalias q='ls'\n0077\n/usr\npipefail       \ton\n"
    assert result.stdout == expected, result
    assert again == state


def test_state_is_saved_after_exit_errexit_and_the_agents_own_exit_trap() -> None:
    for command in (
        "cd /usr; exit 3",
        "cd /usr; set -e; false",
        "trap 'cd /tmp; exit 5' EXIT; cd /usr",
        "cd /usr; kill -TERM $$",
        "cd /usr; ${x?bad}",
    ):
        _, state = run(command)
        assert state is not None and state.cwd == b"/usr", command


@pytest.mark.parametrize("command", ["cd /usr; exec true", "cd /usr; kill -9 $$", "export X=$(printf %040000d 1)"])
def test_a_shell_that_vanishes_or_a_state_too_large_leaves_none(command: str) -> None:
    _, state = run(command)
    assert state is None


def test_a_packed_state_unpacks_to_the_same() -> None:
    _, state = run("cd /usr; export A=1; set -u")
    assert state is not None
    assert ShellState.unpack(state.pack()) == state
    assert ShellState().pack() == b""
    with pytest.raises(ValueError, match="not enough values"):
        ShellState.unpack(b"no state")


@pytest.mark.parametrize("data", [b"", b"/usr\n\0\0umask", b"no path\n\0\0umask\0end\n", b"/usr\n\0\0\0end\n"])
def test_what_is_cut_short_or_no_state_is_not_taken(data: bytes) -> None:
    assert shell_state.saved(data) is None


def test_a_name_that_is_no_variable_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="name of a shell variable"):
        shell_state.startup(ShellState(), b"true", {"a;touch x": "1"})


@pytest.mark.sandbox
async def test_a_result_says_when_the_shell_state_was_not_saved(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    assert (await box.run("cd /tmp")).shell_saved
    assert not (await box.run("cd /usr; export X=$(printf %040000d 1)")).shell_saved
    assert not (await box.run("cd /usr; exec true")).shell_saved
    assert (await box.run("pwd")).stdout == "/tmp\n"


@pytest.mark.sandbox
async def test_the_state_survives_in_a_snapshot(namespace_backend: NamespaceBackend, tmp_path: Path) -> None:
    box = await namespace_backend.open()
    await box.run("f() { echo from f; }; umask 027; export A='1 2'; mkdir d; cd d")
    fork = await namespace_backend.restore(await box.snapshot())
    assert (await fork.run("f; umask; echo $A; pwd; cd -")).stdout == "from f\n0027\n1 2\n/workspace/d\n/workspace\n"
