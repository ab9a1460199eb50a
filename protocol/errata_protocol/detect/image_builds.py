"""Builds of container images: whether one failed, and the instruction of the Dockerfile that did."""

from __future__ import annotations

import re
from collections.abc import Sequence

from errata_protocol.detect.action import Invocation
from errata_protocol.detect.python_traceback import Frame

_FAILED = re.compile(
    r"failed to solve: (?!failed to read dockerfile)|' returned a non-zero code: \d+$|"
    r"^Error: (?:error )?building at STEP |^(?:Error: )?(?:error )?building image: |^executor failed running \["
)
_INSTRUCTION = re.compile(r"(?P<file>[^\s:]{1,400}):(?P<line>\d{1,9})$")
_RULE = "-" * 20
_BUILDERS = frozenset({"docker", "docker-compose", "podman", "podman-compose", "nerdctl", "buildah", "buildctl"})
_VERBS = frozenset({"build", "buildx", "bake", "bud", "build-using-dockerfile", "--build"})


def builds_image(call: Invocation) -> bool:
    """Return whether a call builds an image, whose output has that of the commands in its Dockerfile."""
    return call.program in _BUILDERS and not _VERBS.isdisjoint(call.arguments[:8])


def image_failed(line: str) -> bool:
    """Return whether a builder says in ``line`` that an instruction failed."""
    return _FAILED.search(line) is not None


def failed_instruction(lines: Sequence[str]) -> Frame | None:
    """Return the file and line of the instruction that BuildKit shows as the failed one; None if it shows none."""
    for index, line in enumerate(lines[:-1]):
        if lines[index + 1] == _RULE and (match := _INSTRUCTION.match(line)):
            return Frame(match["file"], int(match["line"]))
    return None
