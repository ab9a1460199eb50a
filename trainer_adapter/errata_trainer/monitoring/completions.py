"""Prints a batch's completions as a table, with the turns that failed highlighted."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..rollouts.rollout import Rollout

FAILED = "bold black on yellow"
"""Style of a failing turn."""

EID = "eid"
"""Name of the column with the keys of the episodes, for `errata replay`."""

Marked = Mapping[int, str]
"""Hint template key of each failing turn of a rollout, by the turn's index."""


def marked_turns(rollout: Rollout) -> dict[int, str]:
    """Return the failing turns of a rollout by their index, each with the hint template key of its error."""
    found = {}
    for turn in rollout.turns:
        if turn.failed is not None and turn.failed.marker is not None:
            found[turn.index] = turn.failed.marker.hint_template_key or turn.failed.marker.error_kind
    return found


def described(marked: Marked) -> str:
    """Return failing turns as text for a table column, e.g. ``turn 1 fs.missing, turn 3 tool.malformed``."""
    return ", ".join(f"turn {turn} {key}" for turn, key in sorted(marked.items()))


def completion_table(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rewards: Mapping[str, Sequence[float | None]],
    advantages: Sequence[float],
    marked: Sequence[Marked],
    *,
    step: int,
    most: int | None = None,
    extra: Mapping[str, Sequence[Any]] | None = None,
    below: Sequence[str] = (),
    viewers: Sequence[str] = (),
) -> Group:
    """Return a table of a step's completions, with a row for each, for rich to print.

    Below it stands for each row with an `EID` the command that shows its episode and its link in the viewer, in a line
    of its own: a cell of the table is too narrow to be copied from. The link of a row that has failing turns leads to
    the first of them. Print it with ``crop=False``, or rich cuts these lines at the width of the terminal. All
    sequences have one item per completion.

    Args:
        prompts: Prompt of each row, a string or a list of messages.
        completions: Completion of each row, a string or a list of messages, in which the n-th assistant message is turn
            n.
        rewards: Rewards of each row by the name of the reward function; None leaves the cell empty.
        advantages: Advantage of each row.
        marked: The failing turns of each completion.
        step: Number of optimizer steps so far.
        most: Show at most this many completions, sampled with ``step`` as the seed; None shows all.
        extra: Further columns by name; `EID` is not shown as a column.
        below: Numbers of the step that are printed below the table.
        viewers: Address of the viewer of the server that played each row, with a slash at its end; "" where none is
            known, and no viewers at all print no link.
    """
    rows = list(range(len(prompts)))
    if most is not None and most < len(rows):
        rows = sorted(random.Random(step).sample(rows, max(0, most)))
    columns = dict(extra or {})
    eids = columns.pop(EID, None)
    table = Table(show_header=True, header_style="bold white", expand=True, show_lines=True)
    table.add_column("#", justify="right")
    table.add_column("Prompt", style="bright_yellow")
    table.add_column("Completion", style="bright_green")
    for name in (*rewards, "Advantage"):
        table.add_column(name, justify="right")
    for name in columns:
        table.add_column(name)
    for row in rows:
        numbers = [*[of_row[row] for of_row in rewards.values()], advantages[row]]
        table.add_row(
            str(row),
            conversation(prompts[row]),
            conversation(completions[row], marked[row]),
            *["" if number is None else f"{number:.2f}" for number in numbers],
            *[str(values[row]) for values in columns.values()],
        )
    panel = Panel(table, expand=False, title=f"Step {step}", border_style="bold white")
    replays = []
    for row in rows:
        if eids and (eid := eids[row]):
            viewer = viewers[row] if viewers else ""
            link = f"  {viewer}#{eid}{'/error' if marked[row] else ''}" if viewer else ""
            replays.append(f"{row:3}  errata replay {eid}{link}")
    return Group(panel, *(Text(line, no_wrap=True, overflow="ignore") for line in [*below, *replays]))


def conversation(messages: Any, marked: Marked | None = None) -> Text:
    """Return messages as text to print; a failing turn has its key beside its role, and `FAILED` as its style."""
    text = Text()
    if isinstance(messages, str):
        return text.append(messages)
    turn = -1
    for number, message in enumerate(messages):
        role = str(message.get("role", ""))
        turn += role == "assistant"
        key = (marked or {}).get(turn) if role == "assistant" else None
        text.append(("\n\n" if number else "") + role.upper(), style="bold red")
        if key is not None:
            text.append(f" {key}", style=FAILED)
        if reasoning := message.get("reasoning_content") or message.get("thinking"):
            text.append(f"\n{reasoning}", style="italic dim")
        body = [_content(message.get("content")), *[_call(call) for call in message.get("tool_calls") or ()]]
        text.append("\n" + "\n".join(part for part in body if part), style=FAILED if key is not None else None)
    return text


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.get("text", f"[{block.get('type', '?')}]") for block in content)


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"{function.get('name', '?')}({arguments})"
    given = arguments.items() if isinstance(arguments, Mapping) else [("", arguments)]
    return f"{function.get('name', '?')}({', '.join(f'{name}={value!r}' for name, value in given)})"
