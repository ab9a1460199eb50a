"""The engine as the broker uses it: docker SDK calls with a deadline, on containers with one label only."""

from __future__ import annotations

import contextlib
import fnmatch
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import docker
from docker import errors

from .engine_client import EngineClient
from .names import Reference, segment
from .schema import Refused

LABEL = "errata.sandbox"
"""Label of every container and layer of a session; its value is the owner, which the broker's operator chose."""
PART = "errata.part"
"""Label with the number of the process that made a container or layer, of those that use one socket."""
FACTS = "errata.facts"
AGENT = "64000:64000"
_TMPFS = "uid=64000,gid=64000,mode=1777,exec,nosuid,nodev"
"""The agent owns a tmpfs, because runc gives it the mode of the directory that it is mounted on."""
QUICK_S, SLOW_S = 30.0, 300.0
"""Deadlines of quick and of slow engine calls, seconds."""
_AT_ONCE = 8
"""Most engine calls of one owner at one time: 150 concurrent deletions made an engine 20.10 hang until it was
restarted. Each owner has its own, so slow calls of one do not keep those of others waiting."""
_COPIES_AT_ONCE = 2
"""Most calls of one owner at one time whose cost grows with what agents wrote."""

# Process 1 of a sandbox. SIGKILL from inside cannot kill it, so `kill -9 -1` of an agent that is root does not stop the
# container. It waits on a pipe that only the engine closes. Bash reaps orphans once a fork has installed its handler.
_FIRST_PROCESS = ("/bin/bash", "--norc", "--noprofile", "-c", "(:); while IFS= read -r _; do :; done")


@dataclass(frozen=True, slots=True)
class Policy:
    """What the broker's operator allows.

    Args:
        engine: The engine's socket, ``unix:///path``.
        images: Patterns (fnmatch) of image names from which sandboxes may be made.
        containers: Most containers of one owner.
        memory_bytes: Most memory of one container.
        pids: Most processes of one container.
        cpus: CPUs of one container; 0 for no limit.
        shm_bytes: Size of ``/dev/shm``.
        archive_bytes: Largest archive that is copied in, counted as it is written out.
        copy_out_bytes: Largest archive that is copied out.
        spool_bytes: Most bytes of archives that the broker holds for one owner.
        connections: Most running requests of one owner.
    """

    engine: str = "unix:///var/run/docker.sock"
    images: tuple[str, ...] = ("errata/*",)
    containers: int = 64
    memory_bytes: int = 4 * 1024**3
    pids: int = 4096
    cpus: float = 0.0
    shm_bytes: int = 64 * 1024**2
    archive_bytes: int = 1024**3
    copy_out_bytes: int = 256 * 1024**2
    spool_bytes: int = 1024**3
    connections: int = 128


class Engine:
    """The containers and layers of one owner. The requests of the broker are methods of the same name.

    Every method raises `Refused`: ``unknown`` for a container or layer that does not exist or has another owner, and
    the codes of `map_errors` if the engine fails.

    Args:
        policy: What is allowed.
        owner: Value of `LABEL`; containers and layers with another value are treated as missing.
    """

    def __init__(self, policy: Policy, owner: str) -> None:
        self.policy = policy
        self.owner = owner
        self._calls = threading.BoundedSemaphore(_AT_ONCE)
        self._copies = threading.BoundedSemaphore(_COPIES_AT_ONCE)
        self._creating = threading.Lock()

    @contextlib.contextmanager
    def _api(self, timeout_s: float | None = None) -> Iterator[Any]:
        """Yield an SDK client for one call, limiting concurrent calls and converting errors; see `map_errors`."""
        timeout_s = QUICK_S if timeout_s is None else timeout_s
        with self._place(self._calls, timeout_s), map_errors(timeout_s):
            api = EngineClient(base_url=self.policy.engine, version="1.41", timeout=timeout_s)
            try:
                yield api
            finally:
                api.close()

    @contextlib.contextmanager
    def _place(self, places: threading.BoundedSemaphore, timeout_s: float) -> Iterator[None]:
        """Hold one of the places of this owner; raise `Refused` (``busy``) if none becomes free in time."""
        if not places.acquire(timeout=timeout_s):
            raise Refused("busy", f"all places of {self.owner} were taken for {timeout_s:.0f} s: try again")
        try:
            yield
        finally:
            places.release()

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Hold one of the places for calls whose cost grows with what agents wrote.

        Raises:
            Refused: ``busy``: none became free in time.
        """
        return self._place(self._copies, QUICK_S)

    def ping(self) -> dict[str, Any]:
        """Return the engine's version, API version and kernel."""
        with self._api(10.0) as api:
            found = api.version(api_version=False)
        return {"engine": found["Version"], "api": found["ApiVersion"], "kernel": found.get("KernelVersion", "")}

    def create(
        self,
        image: str,
        memory_bytes: int = 512 * 1024**2,
        pids: int = 128,
        read_only: bool = False,
        tmpfs: dict[str, int] | None = None,
        part: int = 0,
    ) -> dict[str, Any]:
        """Make a container without network and capabilities, not started; return its id and its image's id.

        Args:
            image: Name of an allowed image, its id, or the id of a layer of this owner.
            memory_bytes: Memory limit.
            pids: Limit of processes.
            read_only: The root file system is read-only.
            tmpfs: Sizes in bytes of tmpfs mounts by path.
            part: Number of the process that makes it, of those that use this socket. `list` tells it; layers that are
                made of the container have it too.

        Raises:
            Refused: ``invalid``: more than the policy allows; ``conflict``: too many containers; ``image_refused``: the
                image is not allowed; ``image_missing``: it does not exist.
        """
        policy = self.policy
        if memory_bytes > policy.memory_bytes or pids > policy.pids:
            raise Refused("invalid", f"at most {policy.memory_bytes} bytes and {policy.pids} processes are allowed")
        with self._creating, self._api() as api:  # one at a time: the limit is checked before the container is made
            image_id = self._image(api, image)
            if len(api.containers(all=True, quiet=True, filters=self._label_filter)) >= policy.containers:
                raise Refused("conflict", f"{self.owner} has {policy.containers} containers: remove some first")
            host = api.create_host_config(
                network_mode="none",
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                privileged=False,
                init=False,
                ipc_mode="private",
                mem_limit=memory_bytes,
                memswap_limit=memory_bytes,
                pids_limit=pids,
                cpu_shares=512,  # half of the default: the server answers however much its containers compute
                nano_cpus=int(policy.cpus * 1e9) or None,
                shm_size=policy.shm_bytes,
                ulimits=[docker.types.Ulimit(name="core", soft=0, hard=0)],
                read_only=read_only,
                tmpfs={at: f"size={size},{_TMPFS}" for at, size in (tmpfs or {}).items()},
                restart_policy={"Name": "no"},
                log_config=docker.types.LogConfig(type="none"),
            )
            made = api.create_container(
                image=image_id,
                entrypoint=list(_FIRST_PROCESS),
                command=[],
                user="0:0",
                hostname="sandbox",
                working_dir="/",
                environment={},
                labels={LABEL: self.owner, PART: str(part)},
                stdin_open=True,
                network_disabled=True,
                healthcheck={"Test": ["NONE"]},
                host_config=host,
            )
        return {"container": made["Id"], "image": image_id}

    def _image(self, api: Any, image: str) -> str:
        """Return the id of an image that the policy allows, or of a layer of this owner.

        Raises:
            Refused: ``image_refused`` or ``image_missing``.
        """
        is_id = image.startswith("sha256:")
        if not is_id and not self._allows(image):
            allowed = ", ".join(self.policy.images) or "none"
            raise Refused(
                "image_refused",
                f"image {image} is not on the broker's list ({allowed}): start the broker with --image '{image}', too",
            )
        found = self._found_image(api, image)
        if found is None:  # also for one that is not this owner's: nobody learns what else the engine has
            what = "layer" if is_id else "image"
            fix = "it was collected" if is_id else f"bring it to the engine first: errata image pull {image}"
            raise Refused("image_missing", f"{what} {image} is not in the engine: {fix}")
        return str(found["Id"])

    def _allows(self, name: str) -> bool:
        """Return whether the policy allows images of a name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.policy.images)

    def _found_image(self, api: Any, image: str) -> dict[str, Any] | None:
        """Return the engine's description of an image; None if there is none that this owner may use by this name."""
        try:
            found: dict[str, Any] = api.inspect_image(image)
        except errors.NotFound:
            return None
        tags, digests = found.get("RepoTags") or (), found.get("RepoDigests") or ()
        if not image.startswith("sha256:"):
            return found if Reference.parse(image).is_carried_by(tags, digests) else None
        return found if found["Id"] == image and (self._is_own(found) or any(map(self._allows, tags))) else None

    @property
    def _label_filter(self) -> dict[str, Any]:
        return {"label": f"{LABEL}={self.owner}"}

    def _is_own(self, found: dict[str, Any]) -> bool:
        """Return whether a container or image, as the engine describes it, has this owner's label."""
        return bool(((found.get("Config") or {}).get("Labels") or {}).get(LABEL) == self.owner)

    def _own(self, api: Any, container: str) -> dict[str, Any]:
        """Return the engine's description of a container of this owner.

        Raises:
            Refused: ``unknown``: it does not exist, has another owner or was not named by its full id.
        """
        unknown = Refused("unknown", f"no container {container[:12]} of {self.owner}")
        try:
            found: dict[str, Any] = api.inspect_container(container)
        except errors.NotFound:
            raise unknown from None
        if found["Id"] != container or not self._is_own(found):
            raise unknown
        return found

    def _call(self, container: str, call: Callable[[Any], Any], timeout_s: float | None = None) -> Any:
        with self._api(timeout_s) as api:
            self._own(api, container)
            return call(api)

    def start(self, container: str) -> dict[str, Any]:
        """Start a container."""
        self._call(container, lambda api: api.start(container))
        return {}

    def restart(self, container: str) -> dict[str, Any]:
        """Kill every process of a container and start it again; its files stay."""
        self._call(container, lambda api: api.restart(container, timeout=0))
        return {}

    def pause(self, container: str) -> dict[str, Any]:
        """Suspend all processes of a container."""
        self._call(container, lambda api: api.pause(container))
        return {}

    def unpause(self, container: str) -> dict[str, Any]:
        """Resume the processes of a container."""
        self._call(container, lambda api: api.unpause(container))
        return {}

    def remove(self, container: str) -> dict[str, Any]:
        """Kill a container and delete it with its volumes."""
        self._call(container, lambda api: api.remove_container(container, force=True, v=True), 60.0)
        return {}

    def inspect(self, container: str, size: bool = False, changes: bool = False) -> dict[str, Any]:
        """Return a container's state and image.

        Args:
            container: Its id.
            size: Also return the size of its writable layer, ``size_bytes``.
            changes: Also return its changed paths, each with the engine's kind: 0 modified, 1 added, 2 deleted.
        """
        heavy = self.copying() if changes else contextlib.nullcontext()
        with heavy, self._api(60.0 if changes else None) as api:
            state = self._own(api, container)
            answer = {
                "running": bool(state["State"]["Running"]),
                "paused": bool(state["State"]["Paused"]),
                "image": state["Image"],
                "started": state["State"]["StartedAt"],
            }
            if size:
                rows = api.containers(all=True, size=True, filters={"id": container})
                answer["size_bytes"] = int(rows[0].get("SizeRw") or 0) if rows else 0
            if changes:
                answer["changes"] = [
                    [row["Path"], row["Kind"]] for row in api.read_list("/containers/{0}/changes", container)
                ]
        return answer

    def list(self) -> dict[str, Any]:
        """Return all containers and layers of this owner."""
        filters = docker.utils.convert_filters(self._label_filter)
        with self.copying(), self._api() as api:
            containers = api.read_list("/containers/json", all=1, filters=filters)
            images = api.read_list("/images/json", all=1, filters=filters)
        layers = [
            {
                "image": row["Id"],
                "facts": _facts(row),
                "part": _part(row),
                "size_bytes": row["Size"],
                "created": row["Created"],
            }
            for row in images
        ]
        return {
            "containers": [{"container": row["Id"], "state": row["State"], "part": _part(row)} for row in containers],
            "layers": layers,
        }

    def commit(self, container: str, facts: dict[str, str]) -> dict[str, Any]:
        """Make a layer, an image of a container's files, with ``facts`` in a label; return its id."""
        with self._api(SLOW_S) as api:
            part = _part(self._own(api, container)["Config"])
            labels = {LABEL: self.owner, PART: str(part), FACTS: json.dumps(facts, sort_keys=True)}
            made = api.commit(container, conf={"Labels": labels})
        return {"image": made["Id"]}

    def remove_image(self, image: str) -> dict[str, Any]:
        """Delete an untagged image that is a layer of this owner.

        Args:
            image: The full image id; an abbreviation or a tag is refused.

        Returns:
            An empty dictionary.

        Raises:
            Refused: ``unknown``: there is no such image, it belongs to another owner, or it has a tag. ``conflict``:
                the image is in use.
        """
        with self._api(SLOW_S) as api:
            try:
                found = api.inspect_image(image)
            except errors.NotFound:
                raise Refused("unknown", f"no layer {image[:19]} of {self.owner}") from None
            if found["Id"] != image or not self._is_own(found) or found.get("RepoTags"):
                raise Refused("unknown", f"no layer {image[:19]} of {self.owner}")
            api.remove_image(image, force=False, noprune=True)
        return {}

    def put(self, container: str, archive: IO[bytes]) -> None:
        """Unpack a tar archive, made by `archives.copy_checked`, in the root directory of a container."""
        self._call(container, lambda api: api.put_archive(container, "/", archive), SLOW_S)

    @contextlib.contextmanager
    def get(self, container: str, path: str) -> Iterator[tuple[Iterator[bytes], dict[str, Any]]]:
        """Yield the chunks of a tar archive of a path, and the path's attributes.

        A call to the engine runs meanwhile, and their number is limited: do not wait for a client inside.

        Raises:
            Refused: ``unknown``: the path does not exist.
        """
        with self._api(SLOW_S) as api:
            self._own(api, container)
            try:
                stream, about = api.get_archive(container, path)
            except errors.NotFound:
                raise Refused("unknown", f"no {path} in container {container[:12]}") from None
            yield stream, about

    def exec_start(self, container: str, argv: Sequence[str], *, root: bool) -> tuple[str, socket.socket, bytes]:
        """Start a program in a container, as root or as the agent.

        Written without the SDK, which loses output that the engine sends together with the HTTP headers.

        Returns:
            The id of the exec, the connection with its streams, and the bytes received so far.

        Raises:
            Refused: ``not_running``: the container is not running; ``engine_failed``: the engine refused it.
        """
        with self._api() as api:
            self._own(api, container)
            made = api.exec_create(container, list(argv), stdin=True, user="0:0" if root else AGENT, workdir="/")
            name = str(made["Id"])
            body = b'{"Detach":false,"Tty":false}'
            address = f"/v1.41/exec/{segment(name)}/start"
            head = (
                f"POST {address} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            link = socket.socket(socket.AF_UNIX)
            try:
                link.settimeout(QUICK_S)
                link.connect(self.policy.engine.removeprefix("unix://"))
                link.sendall(head.encode() + body)
                answer = b""
                while b"\r\n\r\n" not in answer:
                    more = link.recv(65536)
                    if not more:
                        raise Refused("engine_failed", "the engine closed the connection of an exec")
                    answer += more
                    if len(answer) > 1 << 20:
                        raise Refused("engine_failed", "the engine answered an exec with headers without an end")
                headers, _, rest = answer.partition(b"\r\n\r\n")
                status = int(headers.split(b" ", 2)[1])
                if status not in (101, 200):
                    code = "not_running" if status == 409 else "engine_failed"
                    raise Refused(code, f"an exec was not started: {status} {rest.decode('utf-8', 'replace')[:500]}")
            except BaseException:
                link.close()
                raise
        return name, link, rest

    def exec_status(self, name: str) -> int | None:
        """Return the exit status of an exec; None while it runs."""
        with self._api() as api:
            found = api.exec_inspect(name)
        return None if found["Running"] else found["ExitCode"]


@contextlib.contextmanager
def map_errors(timeout_s: float) -> Iterator[None]:
    """Convert exceptions of the SDK to `Refused`.

    The codes are ``unknown``, ``conflict``, ``not_running``, ``engine_failed``, ``deadline`` and ``engine_away``.
    """
    try:
        yield
    except errors.NotFound as error:
        raise Refused("unknown", _short(error)) from error
    except errors.APIError as error:
        text = _short(error)
        code = "conflict" if error.status_code == 409 else "engine_failed"
        if error.status_code == 409 and ("not running" in text or "is paused" in text or "restarting" in text):
            code = "not_running"
        raise Refused(code, text) from error
    except (errors.DockerException, http.client.HTTPException, OSError) as error:  # exceptions of requests are OSErrors
        name = type(error).__name__
        if "Timeout" in name:
            raise Refused("deadline", f"the engine did not answer in {timeout_s:.0f} s") from error
        text = f"the container engine cannot be reached ({name}): start it, or correct the broker's --engine"
        raise Refused("engine_away", text) from error


def _facts(image: dict[str, Any]) -> dict[str, str]:
    """Return the facts in an image's label; none if the label was not made by `Engine.commit`."""
    try:
        found = json.loads((image.get("Labels") or {}).get(FACTS) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _part(labelled: dict[str, Any]) -> int:
    """Return the number in a label that `Engine.create` made; 0 where there is none."""
    text = (labelled.get("Labels") or {}).get(PART) or ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 6 else 0


def _short(error: Any) -> str:
    """Return the engine's message, shortened because it may have long paths that an agent made."""
    text = str(error.explanation or error)
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"
