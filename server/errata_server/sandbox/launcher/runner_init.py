"""Pid 1 of a runner: sets up mount, IPC and UTS namespaces, starts the child, and reports how it ended."""

# pathlib and what it imports would be copied by every fork.
# ruff: noqa: PTH106, PTH123, PTH208

import _signal
import ctypes
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
    mount_mapped,
    prctl,
    send,
    setns,
    unshare,
)
from runner_child import Child
from user_namespace import unprotect

PTYS = 64


def run_init(slot, config, request, control):
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    if config["rootless"]:
        # Pid 1 runs under the agent's uid there. It can be signalled; the kernel drops what it has no handler for. And
        # /proc/1 would be the agent's.
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    prctl(PR_SET_NAME, ctypes.c_char_p(b"init"))
    _, network, joins, users = slot
    setns(network, CLONE_NEWNET)
    unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)
    libc.sethostname(b"sandbox", 7)
    stage = config["stage"]
    mount("proc", f"{stage}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(f"{stage}/empty", f"{stage}/proc/cmdline", "", MS_BIND)  # the host's boot arguments
    ptys = f"newinstance,ptmxmode=0666,mode=620,max={PTYS}"  # the machine has 4096 for everybody
    mount("devpts", f"{stage}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, ptys)
    mount("shm", f"{stage}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m,nr_inodes=4096")
    if users is not None:
        mount_mapped(config["data"], f"{stage}/data", users)
    made_read, made_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            control.close()
            os.close(made_read)
            for fd in joins:
                os.write(fd, b"0")
                os.close(fd)
            Child(config, request, made_write, users).serve()
        except BaseException as error:
            try:
                send(request, ("broken", f"{type(error).__name__}: {error}"))
            except OSError:
                pass
        finally:
            os._exit(71)
    request.close()
    os.close(made_write)
    supervise(child, control, made_read, config["rootless"])


def supervise(child, control, made_read, rootless):
    """Pid 1: reap, obey ``kill``, and at the child's end kill what it left, then report."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wake_write)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    status = None
    while True:
        # First of all without waiting: the child may have ended before the handler was there.
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
                os._exit(0)  # the server is gone or gave the runner back; the kernel kills the namespace
            else:
                libc.kill(-1, _signal.SIGKILL)
    left = []
    try:
        # Every process of the namespace is below a child of pid 1, so no child means that nothing is left.
        os.waitpid(-1, os.WNOHANG)
        let_grow()
        left = alive()
        os.kill(-1, _signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ChildProcessError, ProcessLookupError):
        pass
    made = os.read(made_read, 65536).split(b"\0") if select.select([made_read], [], [], 0)[0] else []
    if rootless and any(made):
        unprotect()
    for path in reversed(made):
        libc.umount2(path, MNT_DETACH)
        try:
            os.rmdir(path)
        except OSError:
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    send(control, ("end", os.waitstatus_to_exitcode(status), left, used.ru_utime + used.ru_stime))
    os._exit(0)


def let_grow():
    """Wait while the number of processes left behind grows, at most a second.

    A fork bomb puts itself into the background, so its command ends at once. It has to meet its limit before it is
    killed, or the agent would read that nothing was wrong.
    """
    count = sum(entry.isdigit() for entry in os.listdir("/proc"))
    for _ in range(100):
        time.sleep(0.01)
        before, count = count, sum(entry.isdigit() for entry in os.listdir("/proc"))
        if count <= before:
            return


def alive():
    """Return the command names of the other processes in this pid namespace, at most 32."""
    names = []
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
