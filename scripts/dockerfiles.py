"""Write the bundled environments' Dockerfiles from the kit's template: ``python scripts/dockerfiles.py [--check]``.

``--check`` compares them instead, and exits with 1 where one differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from errata_environment.scaffold.dockerfile import ImageText, dockerfile

ROOT = Path(__file__).parents[1]


def image(title: str, package: str, tag: str, name: str) -> ImageText:
    """Return what the Dockerfile of a bundled environment says of its own."""
    folder = f"envs/{package}"
    return ImageText(
        about=(
            f"{title} as an image of its own; compose.yaml at the repository's root is the shorter way. The",
            "context is the environment's directory; from the repository's root:",
        ),
        wheel=f"python -m pip wheel --no-deps -w {folder}/dist .",
        file=f"{folder}/server/Dockerfile",
        context=folder,
        tag=tag,
        install='"$ERRATA"',
        name=name,
    )


IMAGES = (
    image("The terminal environment", "terminal_env", "errata-terminal", "terminal"),
    image("swe_bench_lite", "swe_bench_lite_env", "errata-swe", "swe_bench_lite"),
)


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        raise SystemExit(__doc__)
    differ = []
    for each in IMAGES:
        path, text = ROOT / each.file, dockerfile(each)
        if not sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            differ.append(each.file)
    for file in differ:
        print(f"{file} differs from the kit's template: run python scripts/dockerfiles.py")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
