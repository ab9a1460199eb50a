"""docker/kubernetes: it renders, an API server takes it, and what it names is there; `manifests` finds what is not."""

from __future__ import annotations

import copy
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from errata_client import ErrataClient
from errata_server.process import ServerProcess

from .manifests import (
    KUBERNETES,
    NAMES,
    OLDEST,
    ROOT,
    Object,
    container_of,
    environment_of,
    findings,
    only,
    rendered,
    schema_errors,
)

NEWEST = "1.37"
"""The newest schemas of kubernetes-validate."""


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each kustomization in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def objects(name: str) -> list[Object]:
    """What a kustomization renders to."""
    return rendered(name)


def test_all_kustomizations_are_tested() -> None:
    assert {path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml")} == set(NAMES)


def test_every_file_is_rendered_by_a_kustomization() -> None:
    named = {
        KUBERNETES / name / text
        for name in NAMES
        for text in re.findall(r"[\w-]+\.yaml", (KUBERNETES / name / "kustomization.yaml").read_text("utf-8"))
    }
    assert set(KUBERNETES.rglob("*.yaml")) - {KUBERNETES / name / "kustomization.yaml" for name in NAMES} == named


def test_the_oldest_and_the_newest_kubernetes_take_it(name: str, objects: list[Object]) -> None:
    for version in (OLDEST[name], NEWEST):
        assert list(schema_errors(objects, version)) == [], version
    page = (ROOT / "docs/kubernetes.md").read_text("utf-8")
    assert f"Kubernetes {OLDEST[name]}" in page


def test_clients_are_given_the_headless_service(objects: list[Object]) -> None:
    service = only(objects, "Service", only(objects, "StatefulSet")["spec"]["serviceName"])
    (port,) = service["spec"]["ports"]
    page = (ROOT / "docs/kubernetes.md").read_text("utf-8")
    assert f"`dns://{service['metadata']['name']}.errata:{port['port']}/terminal`" in page
    (container,) = container_of(objects)["ports"][:1]
    assert port["port"] == container["containerPort"], "a headless Service translates no port"


def test_what_it_names_is_there(objects: list[Object]) -> None:
    assert findings(objects) == []


OTHER = {"app": "other"}
POD = "spec.template.spec"
ENVS = f"{POD}.containers.0"
ABSENT = object()
MISTAKES: list[tuple[str, str, Any, str]] = [
    ("StatefulSet errata", "spec.selector.matchLabels", OTHER, "the StatefulSet selects other pods than its own"),
    ("StatefulSet errata", "spec.template.metadata.labels", OTHER, "Service errata selects no pod"),
    ("Service errata", "spec.selector", OTHER, "Service errata selects no pod"),
    ("Service errata-members", "spec.selector", OTHER, "Service errata-members selects no pod"),
    ("PodDisruptionBudget errata", "spec.selector.matchLabels", OTHER, "selects no pod"),
    ("NetworkPolicy errata", "spec.podSelector", {}, "selects no pod"),
    ("NetworkPolicy errata", "spec.egress.0.to.0.podSelector.matchLabels", OTHER, "pods that are not there"),
    ("StatefulSet errata", f"{POD}.topologySpreadConstraints.0.labelSelector.matchLabels", OTHER, "counts other pods"),
    ("StatefulSet errata", "spec.serviceName", "errata", "names no headless Service"),
    ("Service errata-members", "spec.publishNotReadyAddresses", False, "cannot find a pod that drains"),
    ("Service errata", "spec.ports.0.targetPort", "web", "leads to port web"),
    ("Service errata", "spec.ports.0.targetPort", "probes", "publishes the port of the probes"),
    ("NetworkPolicy errata", "spec.ingress.0.ports.0.port", "web", "opens port web"),
    ("StatefulSet errata", f"{ENVS}.readinessProbe.httpGet.port", "http", "asks /ready on port http"),
    ("StatefulSet errata", f"{ENVS}.livenessProbe.httpGet.path", "/ready", "livenessProbe asks /ready"),
    ("StatefulSet errata", f"{ENVS}.livenessProbe", ABSENT, "there is no livenessProbe"),
    ("StatefulSet errata", f"{ENVS}.startupProbe.timeoutSeconds", ABSENT, "has no timeout of its own"),
    ("StatefulSet errata", f"{ENVS}.env.0.value", "9000", "not the port of the probes"),
    ("StatefulSet errata", f"{ENVS}.volumeMounts.0.name", "other", "no volume is called other"),
    ("StatefulSet errata", f"{POD}.volumes.0.name", "other", "nobody mounts the volume other"),
    ("StatefulSet errata", f"{ENVS}.volumeMounts.0.mountPath", "/var/data", "/data/server (ERRATA_DATA_DIR) is on the"),
    ("StatefulSet errata", f"{ENVS}.volumeMounts.0.readOnly", True, "/data/server (ERRATA_DATA_DIR) is on the"),
    ("StatefulSet errata", f"{ENVS}.volumeMounts.2.mountPath", "/var/run", "/run is on the read-only"),
    ("StatefulSet errata", f"{ENVS}.env.1.value", "/etc/token", "in no mounted Secret"),
    ("StatefulSet errata", f"{ENVS}.securityContext.readOnlyRootFilesystem", False, "can write to its root"),
    ("StatefulSet errata", f"{POD}.terminationGracePeriodSeconds", 630, "is killed after 630 s"),
    ("StatefulSet errata", f"{ENVS}.lifecycle", ABSENT, "may take inf s"),
    ("PodDisruptionBudget errata", "spec.maxUnavailable", 3, "lets no pod go, or all"),
    ("PodDisruptionBudget errata", "spec.maxUnavailable", 0, "lets no pod go, or all"),
    ("StatefulSet errata", f"{POD}.automountServiceAccountToken", ABSENT, "has a token of the cluster"),
    ("StatefulSet errata", f"{ENVS}.securityContext.capabilities.drop", [], "keeps the engine's capabilities"),
    ("StatefulSet errata", f"{ENVS}.securityContext.allowPrivilegeEscalation", False, "refuses SYS_ADMIN"),
    ("StatefulSet errata", f"{ENVS}.securityContext.procMount", "Unmasked", "refuses procMount"),
    ("StatefulSet errata", f"{POD}.initContainers.0.securityContext.allowPrivilegeEscalation", True, "may gain"),
    ("StatefulSet errata", f"{POD}.hostUsers", False, "in a user namespace"),
    ("StatefulSet errata", f"{POD}.securityContext", {"runAsUser": 10001}, "cannot write to a new volume"),
    ("StatefulSet errata", f"{POD}.securityContext", {"runAsNonRoot": True}, "runAsNonRoot needs runAsUser"),
]
"""Object, field, its wrong value, and what is found."""


def changed(whose: str, field: str, value: Any) -> list[Object]:
    """Return the fleet with another value of a field."""
    objects = copy.deepcopy(RENDERED)
    at: Any = only(objects, *whose.split())
    *way, last = [int(key) if key.isdecimal() else key for key in field.split(".")]
    for key in way:
        at = at[key]
    if value is ABSENT:
        del at[last]
    else:
        at[last] = value
    return objects


@pytest.mark.parametrize(("whose", "field", "value", "found"), MISTAKES)
def test_a_mistake_in_the_fleet_is_found(whose: str, field: str, value: Any, found: str) -> None:
    seen = findings(changed(whose, field, value))
    assert [text for text in seen if found in text], seen


@pytest.mark.parametrize(
    ("whose", "field", "value"),
    [
        ("StatefulSet errata", "spec.replicas", "three"),
        ("StatefulSet errata", f"{ENVS}.env.0.value", 8001),
        ("StatefulSet errata", f"{ENVS}.ready", {}),
        ("StatefulSet errata", "spec.selector", ABSENT),
        ("Service errata", "spec.ports.0.port", "http"),
        ("NetworkPolicy errata", "spec.policyTypes", "Ingress"),
    ],
)
def test_a_field_of_another_type_or_name_is_refused(whose: str, field: str, value: Any) -> None:
    assert list(schema_errors(changed(whose, field, value), NEWEST)) != []


RENDERED = rendered("base")


# -- the commands of the manifest, run by the real command line -------------------------------------------------------


def run(words: list[str], environment: dict[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the manifest, with its paths below a directory."""
    moved = {name: value.replace("/data", f"{directory}/data", 1) for name, value in environment.items()}
    token = directory / "token"
    token.write_text(secrets.token_hex(32))
    return subprocess.run(
        [sys.executable, "-m", "errata_server.cli", *(word.replace("/data", f"{directory}/data") for word in words)],
        env={**os.environ, **moved, "ERRATA_TOKEN_FILE": str(token), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_server_takes_its_arguments(objects: list[Object], tmp_path: Path) -> None:
    container = container_of(objects)
    program, *words = container["args"]
    assert program == "errata" and "command" not in container, "the image's entrypoint prepares the volume"
    checked = run([*words, "--check"], environment_of(container), tmp_path)
    assert checked.returncode == 0 and "the settings are valid" in checked.stderr, checked.stderr


def test_the_drain_takes_its_arguments(objects: list[Object], tmp_path: Path) -> None:
    container = container_of(objects)
    program, *words = container["lifecycle"]["preStop"]["exec"]["command"]
    ended = run(words, environment_of(container), tmp_path)
    assert program == "errata" and ended.returncode == 1, ended.stderr
    assert "no journal in" in ended.stderr, "it understood its arguments: nothing runs here"


def test_the_first_start_names_the_shard_of_a_new_volume(tmp_path: Path) -> None:
    pod = only(RENDERED, "StatefulSet")["spec"]["template"]["spec"]
    program, *words = pod["initContainers"][0]["command"]
    assert program == "errata"
    drawn, again = (run(words, environment_of(container_of(RENDERED)), tmp_path) for _ in range(2))
    assert re.fullmatch(r"[a-z0-9]{12}\n", drawn.stdout), drawn.stderr
    assert again.stdout == drawn.stdout
    directory = Path(environment_of(container_of(RENDERED))["ERRATA_DATA_DIR"])
    assert words[-1] == str(directory) and (tmp_path / directory.relative_to("/") / "shard").is_file()


READ_ONLY = """#!/bin/sh
# Runs Python where only VOLUME and its folders can be written.
exec unshare --mount --propagation private sh -ec '
    mount --bind "$VOLUME" "$VOLUME"
    mount -o remount,bind,ro /
    if touch "$OUTSIDE" 2>/dev/null; then echo "the root file system is not read-only" >&2; exit 1; fi
    exec "$PYTHON" "$@"
' sh "$@"
"""


async def test_the_server_writes_to_its_mounts_alone(tmp_path: Path) -> None:
    container = container_of(RENDERED)
    writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    volume, wrapper = tmp_path / "volume", tmp_path / "python"
    for place in writable:
        (volume / place.removeprefix("/")).mkdir(parents=True)
    wrapper.write_text(READ_ONLY)
    wrapper.chmod(0o755)
    given = {name: value.replace("/data", f"{volume}/data", 1) for name, value in environment_of(container).items()}
    del given["ERRATA_TOKEN_FILE"], given["ERRATA_HEALTH_PORT"]
    environment = {
        **{name: value for name, value in given.items() if name.startswith(("ERRATA_", "HOME", "XDG_"))},
        "VOLUME": str(volume),
        "OUTSIDE": str(tmp_path / "outside"),
        "PYTHON": sys.executable,
        "TMPDIR": f"{volume}/tmp",
        "ERRATA_SANDBOX": "fake",  # real ones: tests/docker, where the root file system is read-only too
    }
    _, _, first, *others, _, _ = container["args"]
    directory = Path(given["ERRATA_DATA_DIR"])
    with ServerProcess(first, directory, *others, env=environment, python=wrapper) as server:
        async with ErrataClient(f"{server.url}/{first}") as client:
            await client.reset()
            await client.step({"command": "echo kept > file"})
        assert not [line for line in server.log if "read-only" in line.lower()], list(server.log)
    assert server.process.returncode == 0
    assert (directory / "journal").is_dir()
