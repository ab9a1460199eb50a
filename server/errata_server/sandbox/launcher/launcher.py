"""The launcher: a small program, started by the server with an empty environment, that makes *runners*.

    server --(socket)--> launcher --fork--> runner: init (pid 1 of its own pid namespace)
                                                    `-- child (pid 2): waits, then becomes bash

A runner is made before it is needed and serves one request. It already has its namespaces, /proc, /dev, an empty
network namespace and a cgroup, so a command only costs the overlay mount, pivot_root and the start of bash. The server
sends the request to the child and ``kill`` to init, and init reports the end.

It imports few modules, of the standard library only, because a fork copies the memory of what was imported, and it has
one thread, because fork and the namespace calls need that. The death of a process ends everything below it: that of the
server is seen through a pidfd, that of the launcher by PR_SET_PDEATHSIG, and with init the kernel kills its pid
namespace.
"""

import _socket
import ctypes
import fcntl
import gc
import marshal
import os
import select
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from kernel import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_SET_NAME,
    PR_SET_SECUREBITS,
    SECBIT_NO_SETUID_FIXUP,
    clone_id_mapped,
    mount,
    prctl,
    send,
    setns,
    unshare,
    write_file,
)
from runner_init import run_init
from user_namespace import become_root, bind_device, fork_into

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal  # which the stubs of the standard library describe; importing it needs `enum`
    from collections.abc import Iterable

    from messages import LauncherConfig, Slot
else:
    import _signal

LAST_UID = 0x6FFFFFFF
"""Uids up to here are mapped to themselves; the host uids that `NamespaceBackend` uses for commands are higher."""
MAX_TIME_WAIT = "/proc/sys/net/ipv4/tcp_max_tw_buckets"
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


def hide_arguments() -> None:
    """Overwrite this process's command line: /proc/1/cmdline in a sandbox would show a path of the host."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rsplit(b")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, b"init", min(4, end - start))


class Slots:
    """Network namespaces, cgroups and user namespaces: one of each for a runner, made on demand and used again.

    Args:
        cgroups: Directories below which each slot gets a cgroup.
        uid: The agent's uid inside a sandbox.
        first_uid: First of the host uids of commands; None if commands share a host uid.
    """

    def __init__(self, cgroups: list[str], uid: int, first_uid: int | None) -> None:
        self.cgroups = cgroups
        self.uid = uid
        self.first_uid = first_uid
        self.made = 0
        self.free: list[Slot] = []
        self.own_network = os.open("/proc/self/ns/net", os.O_RDONLY)

    def take(self) -> "Slot":
        """Return a free slot, or a new one; the caller appends it to `free` after use.

        Raises:
            OSError: A new one could not be made; nothing of it is left open.
        """
        if self.free:
            return self.free.pop()
        opened: list[int] = []
        try:
            slot = self.make(opened)
        except BaseException:
            for fd in opened:  # or each attempt while descriptors are short would leak some
                os.close(fd)
            raise
        self.made += 1
        return slot

    def make(self, opened: list[int]) -> "Slot":
        """Return a new slot; append each descriptor to ``opened`` once it is open."""
        unshare(CLONE_NEWNET)
        try:
            network = os.open("/proc/self/ns/net", os.O_RDONLY)
            opened.append(network)
            with_lo = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
            fcntl.ioctl(with_lo.fileno(), 0x8914, b"lo".ljust(16, b"\0") + b"\x41\0".ljust(24, b"\0"))  # IFF_UP
            with_lo.close()
            # A closed connection of one command must not keep its port in TIME_WAIT for the next command.
            write_file(MAX_TIME_WAIT, b"0")
        finally:
            setns(self.own_network, CLONE_NEWNET)
        name = f"s{self.made}"
        cgroup_procs: list[int] = []
        for root in self.cgroups:
            os.makedirs(f"{root}/{name}", exist_ok=True)
            cgroup_procs.append(os.open(f"{root}/{name}/cgroup.procs", os.O_WRONLY))
            opened.append(cgroup_procs[-1])
        userns = None if self.first_uid is None else make_user_namespace(self.uid, self.first_uid + self.made + 1)
        return name, network, cgroup_procs, userns


def make_user_namespace(inside: int, outside: int) -> int:
    """Return a descriptor of a new user namespace that maps uid and gid ``inside`` to the host's ``outside``.

    All other ids up to `LAST_UID` are mapped to themselves, because root owns the base tree and overlayfs works as
    root; a process that enters drops every capability. The namespace's owner is ``outside`` too: the kernel counts
    inotify instances and similar resources against the owner, so with root as owner all sandboxes would share one
    limit.

    Raises:
        OSError: The kernel refuses user namespaces, or resources are short.
    """
    made_read, made_write = os.pipe()
    try:
        end_read, end_write = os.pipe()
    except OSError:
        os.close(made_read)
        os.close(made_write)
        raise
    try:
        pid = os.fork()
    except OSError:
        for fd in (made_read, made_write, end_read, end_write):
            os.close(fd)
        raise
    if pid == 0:
        try:
            os.close(end_write)
            prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)  # some distributions allow user namespaces to root only
            os.setresgid(outside, outside, outside)
            os.setresuid(outside, outside, outside)
            unshare(CLONE_NEWUSER)
            os.write(made_write, b"\0")
            os.read(end_read, 1)
        except OSError as error:
            os.write(made_write, str(error).encode())
        finally:
            os._exit(0)
    try:
        os.close(made_write)
        os.close(end_read)
        failure = os.read(made_read, 1024)
        if failure != b"\0":
            raise OSError(failure.decode() or "a helper process died")
        mapping = f"0 0 {inside}\n{inside} {outside} 1\n{inside + 1} {inside + 1} {LAST_UID - inside}\n".encode()
        write_file(f"/proc/{pid}/uid_map", mapping)
        write_file(f"/proc/{pid}/gid_map", mapping)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    finally:
        os.close(made_read)
        os.close(end_write)
        os.waitpid(pid, 0)


def probe_id_mapping(config: "LauncherConfig") -> tuple[int | None, str]:
    """Try an id-mapped mount of the data directory.

    Returns:
        The descriptor of a user namespace to try other directories with, and ""; or None and the reason why commands
        cannot have a host uid each.
    """
    if config["first_uid"] is None:
        return None, "not asked for"
    try:
        userns = make_user_namespace(config["uid"], config["first_uid"] - 1)
        os.close(clone_id_mapped(config["data"], userns))
    except OSError as error:
        return None, str(error)
    return userns, ""


def prepare_stage(stage: str, rootless: bool) -> None:
    """Mount what all runners share on the directory ``stage``: mount points for a root's parts, and a read-only /dev.

    Raises:
        OSError: A mount failed.
    """
    mount("stage", stage, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for name in ("root", "proc", "dev", "data", "base", "nothing"):
        os.mkdir(f"{stage}/{name}")
    dev = f"{stage}/dev"
    mount("dev", dev, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    os.umask(0)
    for name, device in DEVICES.items():
        if rootless:
            bind_device(name, f"{dev}/{name}")
        else:
            os.mknod(f"{dev}/{name}", 0o20666, os.makedev(*device))
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{dev}/{name}")
    os.symlink("pts/ptmx", f"{dev}/ptmx")
    os.mkdir(f"{dev}/pts")
    os.mkdir(f"{dev}/shm")
    os.umask(0o022)
    # Runners bind these over what they hide; a bind of a read-only mount is read-only too.
    os.close(os.open(f"{stage}/empty", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
    for empty in (f"{stage}/empty", f"{stage}/nothing"):
        mount(empty, empty, "", MS_BIND)
        mount("", empty, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    mount("dev", dev, "", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, "")


def make_sysctl_writable() -> None:
    """Remount /proc/sys writable in this mount namespace if a container has it read-only."""
    if not os.access(MAX_TIME_WAIT, os.W_OK):  # a directory there is never writable
        mount("", "/proc/sys", "", MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NOEXEC)


def launch(
    slot: "Slot", config: "LauncherConfig", launcher_fds: "Iterable[int]"
) -> tuple[int, tuple[_socket.socket, _socket.socket]]:
    """Fork a runner.

    Args:
        slot: What it uses.
        config: The launcher's configuration.
        launcher_fds: Descriptors that the runner closes.

    Returns:
        Its pid in the launcher's pid namespace, and the server's ends of its request and control sockets.
    """
    request_server, request_child = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    control_server, control_init = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    pid = fork_into(CLONE_NEWPID)
    if pid == 0:
        try:
            for fd in launcher_fds:
                os.close(fd)
            request_server.close()
            control_server.close()
            run_init(slot, config, request_child, control_init)
        except BaseException as error:
            try:
                send(control_init, ("broken", str(error)))
            except OSError:
                pass
        finally:
            os._exit(70)
    request_child.close()
    control_init.close()
    return pid, (request_server, control_server)


def make_runner(
    sock: _socket.socket,
    slots: Slots,
    busy: "dict[int, Slot]",
    config: "LauncherConfig",
    launcher_fds: "Iterable[int]",
) -> None:
    """Make a runner and send it to the server: ``("runner", pid, slot)`` with two sockets.

    If that fails, send ``("failed", message, errno)``. ``busy`` gets the runner's slot by pid; the main loop reports
    the end of every runner in it.
    """
    slot = None
    try:
        slot = slots.take()
        pid, ends = launch(slot, config, launcher_fds)
    except OSError as error:
        if slot is not None:
            slots.free.append(slot)
        send(sock, ("failed", str(error), error.errno))
        return
    busy[pid] = slot
    try:
        send(sock, ("runner", pid, busy[pid][0]), [end.fileno() for end in ends])
    except OSError as error:  # it ends when its sockets are closed
        send(sock, ("failed", str(error), error.errno))
    for end in ends:
        end.close()


def clean_up(config: "LauncherConfig", busy: "Iterable[int]") -> None:
    """Kill the runners and remove the backend's cgroups, since a server killed by SIGKILL cannot do it.

    Errors are ignored: the next start on the same data directory removes the cgroups again.

    Args:
        config: The launcher's configuration.
        busy: Pids of the runners.
    """
    for pid in busy:
        try:
            os.kill(pid, _signal.SIGKILL)
            os.waitpid(pid, 0)
        except OSError:
            pass  # it has ended and was reaped
    for root in config["cgroups"]:
        parent = os.path.dirname(root)
        try:
            # In cgroup v2 only a leaf may contain processes; the server's own cgroup is one.
            leaf = f"{parent}/errata-server"
            write_file(f"{leaf if os.path.isdir(leaf) else parent}/cgroup.procs", b"0")
            for name in os.listdir(root):
                if os.path.isdir(f"{root}/{name}"):
                    remove_cgroup(f"{root}/{name}")
            remove_cgroup(root)
        except OSError:
            pass


def remove_cgroup(path: str) -> None:
    """Kill the processes of a cgroup and remove it; it must have no child cgroups.

    The kernel reports EBUSY for a moment after the last process was reaped; this retries for 3 s.

    Raises:
        OSError: It is missing, is still busy after 3 s, or cannot be removed.
    """
    for _ in range(300):
        try:
            os.rmdir(path)
            return
        except OSError as error:
            if error.errno != 16:  # EBUSY
                raise
        with open(f"{path}/cgroup.procs") as procs:
            for pid in procs.read().split():
                try:
                    os.kill(int(pid), _signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it ended after the file was read
        time.sleep(0.01)
    os.rmdir(path)


def main() -> None:
    """Set up what runners share, then make and reap runners for the server until it closes the socket or ends.

    The socket to the server is the descriptor that the first argument gives. Sends ``("users", why)`` when ready, with
    the user namespace of `probe_id_mapping` if there is one, or ``("broken", message)``; then answers any message but
    ``("kill", pid)`` with `make_runner`, and sends ``("ended", pid)`` for each runner that has ended.
    """
    sock = _socket.socket(fileno=int(sys.argv[1]))
    hide_arguments()
    prctl(PR_SET_NAME, ctypes.c_char_p(b"errata-launch"))
    config: LauncherConfig = marshal.loads(sock.recv(1 << 20))
    try:
        for procs in config["own_cgroups"]:
            write_file(procs, b"0")
        server = os.pidfd_open(config["server"])
        if config["rootless"]:
            become_root()
            # setns back from a slot's network namespace needs CAP_SYS_ADMIN over the namespace to return to.
            unshare(CLONE_NEWNET)
        unshare(CLONE_NEWNS)
        mount("", "/", "", MS_REC | MS_PRIVATE)
        if not config["rootless"]:
            make_sysctl_writable()
        prepare_stage(config["stage"], config["rootless"])
        userns, why_shared = probe_id_mapping(config)
        slots = Slots(config["cgroups"], config["uid"], None if userns is None else config["first_uid"])
        send(sock, ("users", why_shared), () if userns is None else (userns,))
    except OSError as error:
        send(sock, ("broken", str(error)))
        return
    os.chdir("/")
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wake_write)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    for fd in (sock.fileno(), wake_read, server):
        poll.register(fd, select.POLLIN)
    gc.disable()
    gc.freeze()
    launcher_fds = (sock.fileno(), wake_read, wake_write, server)
    busy: dict[int, Slot] = {}
    while True:
        for fd, _ in poll.poll():
            if fd == server:
                clean_up(config, busy)
                return
            if fd == wake_read:
                os.read(wake_read, 512)
                continue
            message = sock.recv(4096)
            if not message:
                clean_up(config, busy)
                return
            order = marshal.loads(message)
            if order[0] == "kill":
                if order[1] in busy:
                    os.kill(order[1], _signal.SIGKILL)
                continue
            make_runner(sock, slots, busy, config, launcher_fds)
        while busy:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            slots.free.append(busy.pop(pid))
            send(sock, ("ended", pid))


if __name__ == "__main__":
    main()
