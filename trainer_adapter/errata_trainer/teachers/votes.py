"""The vote: which action enough teachers agree on, compared with the student's.

The rule, in order. Teachers without a usable answer do not count. If there are none, the outcome is ``no_teachers``; if
fewer than ``min_agree``, ``too_few_teachers``. If no action has ``min_agree`` votes, ``no_consensus``. If one action
leads, it is the student's (``agrees_with_student``) or gives a pair (``consensus``). If several lead, ``tie_break``
decides. A tie-break never gives a pair whose chosen action has no more votes than the student's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

ActionT = TypeVar("ActionT", bound=Hashable)

TieBreak = Literal["skip", "first", "all"]


@dataclass(frozen=True, slots=True)
class Pair(Generic[ActionT]):
    """A preference at one state.

    Attributes:
        chosen: Action that the teachers agreed on.
        rejected: Action that the student took; None if it could not be parsed and only its tokens say what it is.
        weight: Weight of the pair in the loss; the weights of one state sum to 1.
        votes: Number of teachers that chose it.
    """

    chosen: ActionT
    rejected: ActionT | None
    weight: float = 1.0
    votes: int = 0


@dataclass(frozen=True, slots=True)
class Vote(Generic[ActionT]):
    """The outcome of a vote.

    Attributes:
        pairs: Preferences at the state; empty for a skip.
        reason: Reason of the outcome: ``consensus`` or ``tie_broken`` for pairs; ``no_teachers``, ``too_few_teachers``,
            ``no_consensus``, ``agrees_with_student``, ``tie`` or ``student_has_support`` for a skip.
        n_valid: Number of votes that counted.
        top: Number of votes for the leading action.
    """

    pairs: tuple[Pair[ActionT], ...]
    reason: str
    n_valid: int = 0
    top: int = 0

    @property
    def decision(self) -> Literal["pair", "skip"]:
        """Whether the vote gives a pair."""
        return "pair" if self.pairs else "skip"


def vote(
    teacher_actions: Sequence[ActionT | None],
    student_action: ActionT | None,
    *,
    min_agree: int | Literal["majority"] = 2,
    tie_break: TieBreak = "skip",
    families: Sequence[Hashable] | None = None,
) -> Vote[ActionT]:
    """Return the outcome of a vote: pairs, or the reason why there are none.

    Args:
        teacher_actions: Action of each teacher, compared by equality (canonical keys, `KeyedAction`); None for a
            teacher without a usable answer. Their order matters to ``tie_break="first"`` only.
        student_action: Action of the student; None if it could not be parsed: it equals no teacher's.
        min_agree: Votes that an action needs, at least 1; ``"majority"`` is more than half of all teachers asked.
        tie_break: Rule for several leading actions: ``skip``; ``first``, the earliest in teacher order; ``all``, a pair
            of each with equal weights.
        families: Name of each teacher's family. Teachers of one family have one vote together: what most of them with
            an answer say, none where that is not one action. None gives each teacher a vote of its own.

    Raises:
        ValueError: An option has no meaning.
        TypeError: Actions that cannot be compared by a hash, such as `Action`: `ActionKeys.keyed` makes them so. One
            text in place of a sequence of actions.
    """
    _check_actions(teacher_actions, student_action)
    if families is not None:
        teacher_actions = _by_family(teacher_actions, families)
    if tie_break not in get_args(TieBreak):
        raise ValueError(f"tie_break is {tie_break!r}: skip, first or all")
    needed = len(teacher_actions) // 2 + 1 if min_agree == "majority" else min_agree
    if not isinstance(needed, int) or isinstance(needed, bool) or needed < 1:
        raise ValueError(f"min_agree is {min_agree!r}: at least 1, or 'majority'")
    counts = Counter(action for action in teacher_actions if action is not None)
    n_valid = counts.total()
    if not counts:
        return Vote((), "no_teachers")
    top = max(counts.values())
    if n_valid < needed:
        return Vote((), "too_few_teachers", n_valid, top)
    if top < needed:
        return Vote((), "no_consensus", n_valid, top)
    leaders = [action for action, votes in counts.items() if votes == top]
    if len(leaders) == 1:
        if leaders[0] == student_action:
            return Vote((), "agrees_with_student", n_valid, top)
        return Vote((Pair(leaders[0], student_action, 1.0, top),), "consensus", n_valid, top)
    if tie_break == "skip":
        return Vote((), "tie", n_valid, top)
    if student_action in leaders:
        return Vote((), "student_has_support", n_valid, top)
    chosen = leaders[:1] if tie_break == "first" else leaders
    pairs = tuple(Pair(leader, student_action, 1 / len(chosen), top) for leader in chosen)
    return Vote(pairs, "tie_broken", n_valid, top)


def _check_actions(teacher_actions: Sequence[object], student_action: object) -> None:
    if isinstance(teacher_actions, str | bytes):
        raise TypeError("teacher_actions is one text: give a list with an action of each teacher")
    for action in (*teacher_actions, student_action):
        try:
            hash(action)
        except TypeError as error:
            raise TypeError(
                f"an action, a {type(action).__name__}, has no hash: vote on keys, `ActionKeys(tools).keyed(action)`"
            ) from error


def _by_family(actions: Sequence[ActionT | None], families: Sequence[Hashable]) -> list[ActionT | None]:
    """Return one vote for each family, in the order of their first teachers."""
    if len(families) != len(actions):
        raise ValueError(f"{len(families)} families for {len(actions)} teachers: name one for each")
    members: dict[Hashable, list[ActionT | None]] = {}
    for family, action in zip(families, actions, strict=True):
        members.setdefault(family, []).append(action)
    return [_plurality(answers) for answers in members.values()]


def _plurality(actions: Sequence[ActionT | None]) -> ActionT | None:
    ranked = Counter(action for action in actions if action is not None).most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]
