"""Write docs/reference/PACKAGE.md from each package's ``__all__``: what is public, what it can do, each in one line.

python scripts/reference.py            # write
python scripts/reference.py --check    # exit 1 where a file is not what would be written
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    "errata_protocol",
    "errata_protocol.bundle",
    "errata_protocol.bundle_check",
    "errata_protocol.detect",
    "errata_protocol.errors",
    "errata_protocol.fleet",
    "errata_protocol.markers",
    "errata_protocol.mux",
    "errata_protocol.rollouts",
    "errata_protocol.shards",
    "errata_server",
    "errata_server.journal",
    "errata_server.sandbox.base",
    "errata_server.simulation",
    "errata_client",
    "errata_client.fleet",
    "errata_trainer",
    "errata_ablation",
    "errata_trainer.assembly.channel_set",
    "errata_trainer.assembly.collator",
    "errata_trainer.assembly.counterfactual",
    "errata_trainer.assembly.driver",
    "errata_trainer.assembly.layouts",
    "errata_trainer.assembly.pair_source",
    "errata_trainer.hints",
    "errata_trainer.episodes.awaited",
    "errata_trainer.episodes.conversation",
    "errata_trainer.episodes.playing",
    "errata_trainer.episodes.record",
    "errata_trainer.episodes.recorded",
    "errata_trainer.packing",
    "errata_trainer.recipes.cartridge",
    "errata_trainer.recipes.tinker",
    "errata_trainer.recipes.trl",
    "errata_trainer.tiny",
    "errata_trainer.episodes.tools",
    "errata_trainer.channels.compose",
    "errata_trainer.channels.distil",
    "errata_trainer.channels.dpo",
    "errata_trainer.channels.forward",
    "errata_trainer.channels.heads",
    "errata_trainer.channels.pairs",
    "errata_trainer.channels.schedules",
    "errata_trainer.channels.sdpo",
    "errata_trainer.channels.segments",
    "errata_trainer.channels.splicing",
    "errata_trainer.teachers",
    "errata_trainer.teachers.endpoint",
    "errata_environment.application",
    "errata_environment.demos",
    "errata_environment.episodes",
    "errata_environment.grading.control",
    "errata_environment.grading.forks",
    "errata_environment.grading.results",
    "errata_environment.grading.staging",
    "errata_environment.published.agent_text",
    "errata_environment.published.client",
    "errata_environment.published.results",
    "errata_environment.published.tools",
    "errata_environment.sandboxed",
    "errata_environment.session_backend",
    "errata_environment.shared_builds",
    "errata_environment.tasks.directories",
    "errata_environment.tasks.task_api",
    "errata_environment.tool_calls",
    "errata_redteam",
    "swe_bench_lite_env",
    "terminal_env",
)
NEEDS_TORCH = (
    *(f"errata_trainer.assembly.{name}" for name in ("channel_set", "collator", "driver")),
    *(
        f"errata_trainer.channels.{name}"
        for name in ("compose", "distil", "dpo", "forward", "heads", "sdpo", "segments")
    ),
    "errata_trainer.recipes.cartridge",
    "errata_trainer.recipes.tinker",
    "errata_trainer.recipes.trl",
    "errata_trainer.tiny",
    "errata_trainer.teachers.endpoint",  # stamina, which comes with it
)
DIRECTORY = Path(__file__).parents[1] / "docs" / "reference"


def public(package: str) -> list[str]:
    """Return the public names of a module: ``__all__``, or what it defines itself without an underscore."""
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == package
    )


def page(package: str) -> str:
    """Return the reference page of a package."""
    module = importlib.import_module(package)
    lines = [f"# {package}", "", (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " "), ""]
    lines += ["| name | |", "|---|---|"]
    for name in public(package):
        value = getattr(module, name)
        lines.append(f"| `{name}{_signature(value)}` | {_first_line(value)} |")
        if inspect.isclass(value):
            lines += [f"| `{row}` | {_first_line(method)} |" for row, method in _methods(name, value)]
    return "\n".join(lines) + "\n"


def _methods(name: str, cls: type) -> Iterator[tuple[str, object]]:
    """Yield what a class adds to its bases, in the order of the source; fields stand in its own description."""
    for attribute, held in vars(cls).items():
        if attribute.startswith("_"):
            continue
        found = getattr(cls, attribute)
        if isinstance(held, property):
            yield f"{name}.{attribute}", found
        elif inspect.isfunction(held) or isinstance(held, classmethod | staticmethod):
            awaited = "await " if inspect.iscoroutinefunction(found) else ""
            yield f"{awaited}{name}.{attribute}{_signature(found)}", found


def _signature(value: object) -> str:
    if not inspect.isroutine(value):
        return ""
    return "(" + ", ".join(name for name in inspect.signature(value).parameters if name != "self") + ")"


def _first_line(value: object) -> str:
    if not (inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, property)):
        return "a value: its description stands beside it in the source"
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def main() -> int:
    """Write or check all pages."""
    check = "--check" in sys.argv[1:]
    wrong = []
    DIRECTORY.mkdir(exist_ok=True)
    left_out = NEEDS_TORCH if importlib.util.find_spec("torch") is None else ()
    if left_out:
        print(f"left out, torch is missing (make trainer): {', '.join(left_out)}", file=sys.stderr)
    for package in (package for package in PACKAGES if package not in left_out):
        path = DIRECTORY / f"{package}.md"
        text = page(package)
        if check and (not path.exists() or path.read_text() != text):
            wrong.append(str(path))
        elif not check:
            path.write_text(text)
    for path_ in wrong:
        print(f"{path_} is out of date: run python scripts/reference.py", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
