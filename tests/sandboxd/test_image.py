"""The broker's image: what the Dockerfile puts in it is what the broker imports."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LOCKED = {
    name.lower().replace("_", "-")
    for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements/sandboxd.lock").read_text("utf-8"), re.M)
}


def test_the_broker_needs_nothing_that_its_lock_does_not_have(tmp_path: Path) -> None:
    for top, distributions in packages_distributions().items():
        spec = find_spec(top) if {name.lower().replace("_", "-") for name in distributions} & LOCKED else None
        if spec is not None and spec.origin is not None:
            place = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
            (tmp_path / place.name).symlink_to(place)
    (tmp_path / "errata_sandboxd").symlink_to(ROOT / "server/errata_sandboxd")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import errata_sandboxd.service, errata_sandboxd.images; "
    )
    program += "import errata_sandboxd.engine_client, errata_sandboxd.cli; print(sys.modules['docker'].__file__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_the_image_has_nothing_of_the_server() -> None:
    text = (ROOT / "docker/Dockerfile").read_text("utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))
    assert re.search(r"^FROM \$\{BASE\} AS broker$", text, re.M)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", stages["broker-files"] + stages["broker"], re.M)
    assert copied == ["requirements/sandboxd.lock", "server/errata_sandboxd"]
    groups = {name: re.findall(r"groupadd --system --gid (\d+) errata", stages[name]) for name in ("python", "broker")}
    assert groups["python"] == groups["broker"] != [], "the server is in the socket's group, by its number"
    assert re.findall(r"^COPY --from=(\S+)", stages["broker"], re.M) == ["broker-files"]


def test_the_brokers_memory_has_a_limit_that_its_bounds_fit_in() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]["sandboxd"]
    options = dict(zip(service["command"][::2], service["command"][1::2], strict=True))
    (tmpfs,) = service["tmpfs"]
    size_mib = int(re.search(r"size=(\d+)m", tmpfs)[1])  # type: ignore[index]
    assert int(options["--archive-mib"]) <= int(options["--spool-mib"]) < size_mib
    assert int(service["mem_limit"].removesuffix("m")) >= size_mib + 800, "128 connections, two lists, Python itself"
    assert service["memswap_limit"] == service["mem_limit"] and service["pids_limit"] > 128 + 128
