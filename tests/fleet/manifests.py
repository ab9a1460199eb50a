"""Renders docker/kubernetes, and finds what an API server takes and a cluster would not run: names that match nothing.

The schemas say what a field may be; `findings` compares fields with each other, with the image and with the server.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from errata_server.serve.server import END_S, SHUTDOWN_S

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "docker/kubernetes"
NAMES = ("base", "single", "unprivileged")
"""The kustomizations."""

OLDEST = {"base": "1.30", "single": "1.30", "unprivileged": "1.33"}
"""Oldest Kubernetes of each, as docs/kubernetes.md says."""

Object = dict[str, Any]


def program(name: str) -> str:
    """Return the path of a program of this environment."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def rendered(name: str) -> list[Object]:
    """Return the objects of a kustomization."""
    found = subprocess.run(
        [program("kubectl"), "kustomize", str(KUBERNETES / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (found.returncode, found.stderr) == (0, ""), found.stderr
    return list(yaml.safe_load_all(found.stdout))


def only(objects: Sequence[Object], kind: str, name: str | None = None) -> Object:
    """Return the only object of a kind, or of a kind and a name."""
    (found,) = (one for one in objects if one["kind"] == kind and name in (None, one["metadata"]["name"]))
    return found


def container_of(objects: Sequence[Object]) -> Object:
    """Return the container of the server."""
    (found,) = only(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def image_environment() -> dict[str, str]:
    """Return the environment variables that docker/Dockerfile sets for the server."""
    text = (ROOT / "docker/Dockerfile").read_text("utf-8").replace("\\\n", " ")
    stages = re.split(r"^FROM .* AS (\w+)$", text, flags=re.MULTILINE)
    stage = stages[stages.index("envs") + 1]
    lines = [line.removeprefix("ENV ") for line in stage.splitlines() if line.startswith("ENV ")]
    return dict(word.split("=", 1) for line in lines for word in line.split())


def environment_of(container: Object) -> dict[str, str]:
    """Return the variables of a container's process whose values the manifest or the image has."""
    given = {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
    return {**image_environment(), **given}


def schema_errors(objects: Sequence[Object], version: str) -> Iterator[str]:
    """Yield what the API of a version refuses by its schemas."""
    for one in objects:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{one['kind']} {one['metadata']['name']}: {'.'.join(map(str, error.path))}: {error.message}"


def findings(objects: Sequence[Object]) -> list[str]:
    """Return what does not fit together; empty where all does."""
    workload = only(objects, "StatefulSet")
    pod = workload["spec"]["template"]
    return [
        *_selectors(objects, workload, pod["metadata"]["labels"]),
        *_ports(objects, pod["spec"]),
        *_volumes(workload),
        *_directories(pod["spec"]),
        *_privileges(pod["spec"]),
        *_ends(objects, workload),
    ]


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _selectors(objects: Sequence[Object], workload: Object, labels: Mapping[str, str]) -> Iterator[str]:
    spec = workload["spec"]
    if not _matches(spec["selector"]["matchLabels"], labels):
        yield "the StatefulSet selects other pods than its own"
    for spread in spec["template"]["spec"].get("topologySpreadConstraints", ()):
        if not _matches(spread["labelSelector"]["matchLabels"], labels):
            yield "a spread constraint counts other pods"
    for one in objects:
        kind, name = one["kind"], one["metadata"]["name"]
        if kind == "Service" and not _matches(one["spec"]["selector"], labels):
            yield f"Service {name} selects no pod"
        if kind == "PodDisruptionBudget" and not _matches(one["spec"]["selector"]["matchLabels"], labels):
            yield f"PodDisruptionBudget {name} selects no pod"
        if kind == "NetworkPolicy":
            if not _matches(one["spec"]["podSelector"].get("matchLabels", {}), labels):
                yield f"NetworkPolicy {name} selects no pod"
            for rule in one["spec"].get("egress", ()):
                for to in rule.get("to", ()):
                    if not _matches(to["podSelector"]["matchLabels"], labels):
                        yield f"NetworkPolicy {name} lets pods reach pods that are not there"
    headless = [
        one
        for one in objects
        if one["kind"] == "Service" and one["metadata"]["name"] == workload["spec"]["serviceName"]
    ]
    if not headless or headless[0]["spec"].get("clusterIP") != "None":
        yield "the StatefulSet's serviceName names no headless Service"
    elif headless[0]["spec"].get("publishNotReadyAddresses") is not True:
        yield "clients cannot find a pod that drains: its Service publishes ready pods only"


def _ports(objects: Sequence[Object], pod: Object) -> Iterator[str]:
    (container,) = pod["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = str(named.get("probes"))
    if environment_of(container)["ERRATA_HEALTH_PORT"] != probes:
        yield "ERRATA_HEALTH_PORT is not the port of the probes"
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind)
        if probe is None:
            yield f"there is no {kind}"
            continue
        asked = (probe["httpGet"]["port"], probe["httpGet"]["path"])
        if asked != ("probes", "/health" if kind == "livenessProbe" else "/ready"):
            yield f"the {kind} asks {asked[1]} on port {asked[0]}"
        if not 2 <= probe.get("timeoutSeconds", 1) <= probe.get("periodSeconds", 10):
            yield f"the {kind} has no timeout of its own, or one longer than its period"
    for one in objects:
        name = one["metadata"]["name"]
        if one["kind"] == "Service":
            for port in one["spec"]["ports"]:
                if port["targetPort"] not in named:
                    yield f"Service {name} leads to port {port['targetPort']}, which no container has"
                elif port["targetPort"] == "probes":
                    yield f"Service {name} publishes the port of the probes"
        if one["kind"] == "NetworkPolicy":
            for rule in one["spec"].get("ingress", ()):
                for port in rule["ports"]:
                    if port["port"] not in named:
                        yield f"NetworkPolicy {name} opens port {port['port']}, which no container has"


def _containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def _volumes(workload: Object) -> Iterator[str]:
    pod = workload["spec"]["template"]["spec"]
    claims = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
    volumes = claims | {one["name"] for one in pod["volumes"]}
    mounted = {mount["name"] for container in _containers(pod) for mount in container["volumeMounts"]}
    yield from (f"no volume is called {name}" for name in sorted(mounted - volumes))
    yield from (f"nobody mounts the volume {name}" for name in sorted(volumes - mounted))
    if not claims and not any("persistentVolumeClaim" in one for one in pod["volumes"]):
        yield "nothing is kept when the pod goes"


def _directories(pod: Object) -> Iterator[str]:
    (container,) = pod["containers"]
    environment = environment_of(container)
    writable = [Path(one["mountPath"]) for one in container["volumeMounts"] if not one.get("readOnly")]
    if not all(one["securityContext"].get("readOnlyRootFilesystem") for one in _containers(pod)):
        yield "a container can write to its root file system"
    for name in ("HOME", "XDG_CACHE_HOME", "ERRATA_BASE_DIR", "ERRATA_DATA_DIR", "ERRATA_SWE_STORE"):
        if not any(Path(environment[name]).is_relative_to(place) for place in writable):
            yield f"{environment[name]} ({name}) is on the read-only root file system"
    for needed in ("/tmp", "/run"):
        if Path(needed) not in writable:
            yield f"{needed} is on the read-only root file system"
    token = Path(environment.get("ERRATA_TOKEN_FILE", "/"))
    secrets = {one["name"] for one in pod["volumes"] if "secret" in one}
    if not any(
        token.is_relative_to(one["mountPath"]) and one["name"] in secrets and one.get("readOnly")
        for one in container["volumeMounts"]
    ):
        yield "ERRATA_TOKEN_FILE is in no mounted Secret"


def _privileges(pod: Object) -> Iterator[str]:
    of_pod = pod.get("securityContext", {})
    for container in _containers(pod):
        name, given = container["name"], {**of_pod, **container["securityContext"]}
        added = given.get("capabilities", {}).get("add", [])
        if given.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{name} keeps the engine's capabilities"
        if "SYS_ADMIN" in added and given.get("allowPrivilegeEscalation") is not True:
            yield f"{name}: Kubernetes refuses SYS_ADMIN without allowPrivilegeEscalation"
        if not added and given.get("allowPrivilegeEscalation") is not False:
            yield f"{name} may gain privileges"
        if given.get("procMount") == "Unmasked" and pod.get("hostUsers") is not False:
            yield f"{name}: Kubernetes refuses procMount Unmasked without hostUsers: false"
        if added and pod.get("hostUsers") is False:
            yield f"{name} has capabilities in a user namespace, where it cannot make devices and id-mapped mounts"
        if given.get("runAsNonRoot") and not given.get("runAsUser"):
            yield f"{name}: the image's user is root, so runAsNonRoot needs runAsUser"
        if given.get("runAsUser") and "fsGroup" not in of_pod:
            yield f"{name} cannot write to a new volume, which is root's"
    if pod.get("automountServiceAccountToken") is not False:
        yield "the pod has a token of the cluster"


def _ends(objects: Sequence[Object], workload: Object) -> Iterator[str]:
    spec, pod = workload["spec"], workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    grace = pod["terminationGracePeriodSeconds"]
    stop = drain_s(container) + SHUTDOWN_S + 2 * END_S
    if grace < stop:
        yield f"the pod is killed after {grace} s, and the drain and the end of the server may take {stop} s"
    for budget in (one for one in objects if one["kind"] == "PodDisruptionBudget"):
        most = budget["spec"].get("maxUnavailable")
        if not isinstance(most, int) or not 1 <= most <= max(1, spec["replicas"] - 1):
            yield f"PodDisruptionBudget {budget['metadata']['name']} lets no pod go, or all"


def drain_s(container: Object) -> float:
    """Return the longest time that the container's preStop command takes, seconds; infinite where it has no bound."""
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    if command[:3] != ["errata", "fleet", "drain"] or "--most" not in command:
        return float("inf")
    return float(command[command.index("--most") + 1])
