"""Pid 1 of a runner: sets up mount, IPC and UTS namespaces, starts the child, and reports how it ended."""

# A fork copies the memory of what was imported, so no pathlib.
# ruff: noqa: PTH106, PTH108, PTH113, PTH123, PTH208

import _socket
import ctypes
import marshal
import os
import resource
import select
import time

from kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUTS,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    PR_SET_DUMPABLE,
    PR_SET_NAME,
    PR_SET_PDEATHSIG,
    libc,
    mount,
    mount_id_mapped,
    prctl,
    send,
    setns,
    unshare,
)
from runner_child import Child
from user_namespace import make_writable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal  # which the stubs of the standard library describe; importing it needs `enum`
    from typing import NoReturn

    from messages import LauncherConfig, Slot
else:
    import _signal

PTYS = 64
"""Pseudo-terminals of one sandbox: the kernel has 4096 for the whole machine (kernel.pty.max)."""


def run_init(slot: "Slot", config: "LauncherConfig", request: _socket.socket, control: _socket.socket) -> "NoReturn":
    """Be pid 1 of a new pid namespace: set the namespaces up, fork the child, supervise it and exit.

    Args:
        slot: What this runner uses until it ends.
        config: The launcher's configuration.
        request: The child's end of the request socket.
        control: This process's end of the control socket.
    """
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    if config["rootless"]:
        # There pid 1 has the agent's uid, so the agent may signal it: the kernel drops signals without a handler. And
        # not dumpable, or the agent could open its files in /proc/1.
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    prctl(PR_SET_NAME, ctypes.c_char_p(b"init"))
    _, network, cgroup_procs, userns = slot
    setns(network, CLONE_NEWNET)
    unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)
    libc.sethostname(b"sandbox", 7)
    stage = config["stage"]
    mount("proc", f"{stage}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(f"{stage}/empty", f"{stage}/proc/cmdline", "", MS_BIND)  # the host's boot arguments
    ptys = f"newinstance,ptmxmode=0666,mode=620,max={PTYS}"
    mount("devpts", f"{stage}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, ptys)
    mount("shm", f"{stage}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m,nr_inodes=4096")
    if userns is not None:
        mount_id_mapped(config["data"], f"{stage}/data", userns)
    mount_points_read, mount_points_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            control.close()
            os.close(mount_points_read)
            for fd in cgroup_procs:
                os.write(fd, b"0")
                os.close(fd)
            Child(config, request, mount_points_write, userns).serve()
        except BaseException as error:
            try:
                send(request, ("broken", f"{type(error).__name__}: {error}"))
            except OSError:
                pass
        finally:
            os._exit(71)
    request.close()
    os.close(mount_points_write)
    supervise(child, control, mount_points_read, config["rootless"])


def supervise(child: int, control: _socket.socket, mount_points: int, rootless: bool) -> "NoReturn":
    """Wait for the child, kill what it left running, remove mount points that it made, report to the server, and exit.

    Any packet on the control socket kills the child and all other processes of the namespace; its end (the server
    closed it or died) makes this process exit, and the kernel then kills the namespace.

    Args:
        child: Pid of the child.
        control: This process's end of the control socket.
        mount_points: Read end of the pipe on which the child sends its mount points, as `Child.bind` returns them.
        rootless: The root was mounted read-only, and has to be writable to remove the mount points.
    """
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wake_write)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    status: int | None = None
    while True:
        # Before the first poll: the child may have ended before the handler was installed.
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    status = ended[1]
        except ChildProcessError:
            pass
        if status is not None:
            break
        for fd, _ in poll.poll():
            if fd == wake_read:
                os.read(wake_read, 512)
            elif control.recv(16) == b"":
                os._exit(0)
            else:
                libc.kill(-1, _signal.SIGKILL)
    left: list[bytes] = []
    try:
        # Every process of the namespace descends from a child of pid 1: without a child this raises, and none is left.
        os.waitpid(-1, os.WNOHANG)
        wait_while_growing()
        left = process_names()
        os.kill(-1, _signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ChildProcessError, ProcessLookupError):
        pass
    sent = os.read(mount_points, 65536) if select.select([mount_points], [], [], 0)[0] else b""
    mounted: list[tuple[bytes, bool]] = marshal.loads(sent) if sent else []
    if rootless and any(made for _, made in mounted):
        make_writable()
    for path, made in reversed(mounted):
        libc.umount2(path, MNT_DETACH)
        if made:
            remove_mount_point(path)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    send(control, ("end", os.waitstatus_to_exitcode(status), left, used.ru_utime + used.ru_stime))
    os._exit(0)


def remove_mount_point(path: bytes) -> None:
    """Remove a file or an empty directory. A directory with files that the command left stays; errors are ignored."""
    try:
        os.unlink(path) if os.path.isfile(path) else os.rmdir(path)
    except OSError:
        pass


def wait_while_growing() -> None:
    """Wait while the number of processes in this pid namespace grows, at most 1 s.

    A fork bomb goes into the background, so its command ends at once. It has to reach the limit of processes before it
    is killed, or the command's result would not say that it did.
    """
    count = sum(entry.isdigit() for entry in os.listdir("/proc"))
    for _ in range(100):
        time.sleep(0.01)
        before, count = count, sum(entry.isdigit() for entry in os.listdir("/proc"))
        if count <= before:
            return


def process_names() -> list[bytes]:
    """Return the command names of up to 32 processes in this pid namespace besides pid 1 and zombies."""
    names: list[bytes] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or entry == "1" or len(names) >= 32:
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                head, tail = stat.read().rsplit(b")", 1)
        except OSError:
            continue
        if tail.split()[0] not in (b"Z", b"X"):
            names.append(head.split(b"(", 1)[1])
    return names
