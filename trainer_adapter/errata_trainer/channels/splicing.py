"""Inserts a hint before a failing turn: builds the teacher's row of channel 2, token for token.

    student    prompt | turn 0 | result, header | turn 1 | result, header | TURN 2
    teacher    prompt | turn 0 | result, header | turn 1 | result, hint, header | TURN 2

The hint is inserted directly before the header (the generation prompt) of the failing turn. Everything before it is the
student's own tokens, a prefix that teacher and student share, and the row ends with the turn, so the teacher sees
nothing that came later. From the hint on the two sequences differ in length, so items carry positions for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..rollouts.rollout import Rollout, SdpoItem, Turn


class DoesNotFit(ValueError):
    """Hint, header and turn alone exceed ``max_length``. Skip the site; none of these is ever cut."""


def splice(
    rollout: Rollout,
    turn: Turn | int,
    hint_ids: Sequence[int],
    *,
    header_ids: Sequence[int],
    max_length: int | None = None,
    prompt_head: int = 1,
    weight: float = 1.0,
    hint_template_key: str | None = None,
    targets: Iterable[range] | None = None,
) -> SdpoItem:
    """Return the item that distils one turn: the teacher's row, and the positions that predict the turn's tokens in
    both rows.

    Args:
        rollout: Rollout of the student.
        turn: The failing turn, or its index in ``rollout.turns``.
        hint_ids: The hint as a whole message, rendered as the chat template would between the last message and a
            generation prompt. May be empty: then teacher and student agree.
        header_ids: The generation prompt, with which the context of each turn ends.
        max_length: Most tokens of the teacher's row; None for no bound. A row that is too long loses its oldest
            history: whole turns with what answered them, then tokens of the prompt from its front. Hint and turn stay
            whole.
        prompt_head: Number of first tokens of the prompt that are kept even then, e.g. a system message. Keep at least
            the first, on which models rest much of their attention.
        weight: Weight of each of the turn's tokens in the loss.
        hint_template_key: Hint template key, kept with the item.
        targets: Ranges of token offsets in the turn that are compared, e.g. `ActionTokens.call_spans`; None compares
            the whole turn. Both rows hold the whole turn in either case.

    Returns:
        The item; ``student_positions`` count in ``prompt_ids + completion_ids``.

    Raises:
        DoesNotFit: ``max_length`` is below prompt head, hint, header and turn.
        ValueError: The turn is not the rollout's, is empty, or its context does not end with ``header_ids``; history
            has to go, and the prompt does not end with ``header_ids``; ``targets`` are empty or not in the turn.
    """
    site = rollout.turns[turn] if isinstance(turn, int) else turn
    hint, header = tuple(hint_ids), tuple(header_ids)
    _check(rollout, site)
    student = rollout.prompt_ids + rollout.completion_ids
    start, stop = len(rollout.prompt_ids) + site.start, len(rollout.prompt_ids) + site.stop
    if student[start - len(header) : start] != header or start < len(header):
        raise ValueError(
            f"turn {site.index} of the rollout is not preceded by the generation prompt {header}, "
            f"but by {student[max(0, start - len(header)) : start]}: a hint cannot be put before it"
        )
    own = student[start:stop]
    offsets = tuple(range(len(own))) if targets is None else tuple(sorted({n for span in targets for n in span}))
    if not offsets or offsets[0] < 0 or offsets[-1] >= len(own):
        raise ValueError(f"turn {site.index} has {len(own)} tokens: no targets, or some outside of it")
    tail = hint + header + own
    room = None if max_length is None else max_length - len(tail)
    teacher = _history(rollout, site, header, room, prompt_head) + tail
    first = len(teacher) - len(own)
    return SdpoItem(
        turn=site.index,
        teacher_ids=teacher,
        student_positions=tuple(start - 1 + n for n in offsets),
        teacher_positions=tuple(first - 1 + n for n in offsets),
        target_ids=tuple(own[n] for n in offsets),
        shared_prefix=common_prefix(teacher, student),
        weight=weight,
        hint_template_key=hint_template_key,
    )


def check_alignment(item: SdpoItem, student_ids: Sequence[int]) -> None:
    """Check that both positions of each target predict it, for items that were stored or made elsewhere.

    Args:
        item: Item of channel 2.
        student_ids: ``prompt_ids + completion_ids`` of its rollout.

    Raises:
        ValueError: The first target for which they do not.
    """
    sides = (("student", student_ids, item.student_positions), ("teacher", item.teacher_ids, item.teacher_positions))
    for name, ids, positions in sides:
        if len(positions) != len(item.target_ids):
            raise ValueError(f"{len(item.target_ids)} targets, {len(positions)} positions of the {name}")
        for number, (position, target) in enumerate(zip(positions, item.target_ids, strict=True)):
            if not 0 <= position < len(ids) - 1 or ids[position + 1] != target:
                raise ValueError(
                    f"target {number} of turn {item.turn}, {target}, is not behind position {position} of the {name}"
                )


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def _check(rollout: Rollout, site: Turn) -> None:
    if site not in rollout.turns:
        raise ValueError(f"turn {site.index} is none of the rollout's {len(rollout.turns)}")
    if not site.start < site.stop <= len(rollout.completion_ids):
        raise ValueError(f"turn {site.index} is [{site.start}, {site.stop}) of {len(rollout.completion_ids)} tokens")


def _history(
    rollout: Rollout, site: Turn, header: tuple[int, ...], room: int | None, prompt_head: int
) -> tuple[int, ...]:
    """Return the context of the turn without its header, cut to at most ``room`` tokens."""
    prompt, completion = rollout.prompt_ids, rollout.completion_ids
    earlier = sorted(turn.start for turn in rollout.turns if turn.start < site.start)
    whole = (prompt + completion[: site.start])[: -len(header) or None]
    if room is None or len(whole) <= room:
        return whole
    cannot = f"the rollout's prompt does not end with the generation prompt {header}: it cannot be cut"
    if min(turn.start for turn in rollout.turns) > 0 and prompt[len(prompt) - len(header) :] != header:
        raise ValueError(cannot)  # it stands in the completion, before the first turn
    # A turn goes with what answered it, up to the header of the next: that one then stands behind the prompt's header.
    for begin in (*earlier, site.start):
        history = (prompt + completion[begin : site.start])[: -len(header) or None]
        if len(history) <= room:
            return history
    if prompt[len(history) :] != header:
        raise ValueError(cannot)
    over = len(history) - room
    head = min(prompt_head, len(history))
    if room < head:
        raise DoesNotFit(f"turn {site.index} with its hint leaves room for {room} tokens of its prompt")
    return history[:head] + history[head + over :]
