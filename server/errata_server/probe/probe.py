"""`probe`: plays a target several times and returns which recovery class it can have, and with which options.

Two servers with different hash seeds get the same requests. If their answers differ, a third server gets them with the
first one's hash seed. Then a server is started with the options found, killed in the middle of the same requests and
started again, where the session and a fork of it continue. Options are only advised if that succeeded.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errata_protocol import json_path
from errata_protocol.environment import Recovery
from errata_protocol.errors import ServiceError

from ..process import ServerProcess
from ..recovery import recovery_class
from ..targets.load import Servable, Stated, load
from .actions import ActionGenerator
from .advice import snapshot_lines
from .play import PlayFailed, Socket, fork, start_server
from .requests import Request, with_reset
from .verdict import Answers, Compared, FieldDifference, Outcome, Verdict, compared, remaining_differences

HASH_SEEDS = ("101", "202")
STEPS = 24
"""Default number of actions in a play."""

MORE_RESETS = 2
"""Additional resets in a play: values that are drawn once an episode differ between resets."""

ENOUGH = 3
"""Fewer different answers than these are too little to judge by."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play.

    Args:
        target: As for ``errata serve``.
        requests: Recorded requests; if empty, ``steps`` actions are drawn.
        steps: Number of actions to draw.
        seed: Seed of the actions and resets.
        stated: Action and observation classes of a target that does not declare them.
        progress: Called with a line of text at each stage.
    """

    target: str
    requests: Sequence[Request] = ()
    steps: int = STEPS
    seed: int = 0
    stated: Stated = field(default_factory=Stated)
    progress: Callable[[str], None] = lambda _: None

    @property
    def options(self) -> tuple[str, ...]:
        """Options of ``errata serve`` that every server of the target needs."""
        given = (("--action", self.stated.action), ("--observation", self.stated.observation))
        return tuple(part for name, value in given if value is not None for part in (name, value))


@dataclass(slots=True)
class _Play:
    requests: list[Request]
    answers: list[dict[str, Any]]
    state: dict[str, Any]


def probe(plan: Plan) -> Verdict:
    """Find out which recovery class a target can have.

    Raises:
        InvalidRequest: There is no such target.
        ServiceError: A server did not start, or failed for a reason that is not the environment's.
    """
    servable = load(plan.target, stated=plan.stated)
    with tempfile.TemporaryDirectory(prefix="errata-probe-") as scratch:
        return _Probe(plan, servable, Path(scratch)).run()


class _Probe:
    def __init__(self, plan: Plan, servable: Servable, scratch: Path) -> None:
        self._plan = plan
        self._servable = servable
        self._scratch = scratch

    def run(self) -> Verdict:
        plan = self._plan
        plan.progress(f"two plays of {self._servable.name} in fresh processes")
        with ExitStack() as running, ThreadPoolExecutor(2) as threads:
            starts = [threads.submit(self._start, (), seed) for seed in HASH_SEEDS]
            servers = [running.enter_context(start.result()) for start in starts]
            with Socket(servers[0].url) as socket:
                verdict = Verdict(plan.target, self._servable.name, Recovery(socket.capabilities["recovery"]))
                first = self._first(socket)
            second = self._replay(servers[1], first.requests)
        verdict.requests = len(first.requests)
        shown = {repr(_shown_to_agent(answer)) for answer in first.answers}
        errors = sum("error" in answer for answer in first.answers)
        verdict.answers = (len(shown), errors)
        third = second
        if _differ(first, second):
            plan.progress("their answers differ: a third play with the first one's hash seed")
            with self._start((), HASH_SEEDS[0]) as server:
                third = self._replay(server, first.requests)
        found = compared(first.answers, second.answers, third.answers)
        verdict.differs = sorted(
            [*found.volatile.values(), *found.hash_order.values(), *found.real.values()], key=lambda f: f.request
        )
        verdict.state_differs = remaining_differences([first.state], [third.state], [("episode_id",)])
        if len(shown) < ENOUGH or errors == len(first.answers):
            verdict.why.append(
                f"{len(first.requests)} requests had {len(shown)} different answers, {errors} errors among them: too "
                "few to judge by; give actions that do something with --actions FILE"
            )
            return verdict
        self._judge(verdict, first, found)
        return verdict

    def _judge(self, verdict: Verdict, first: _Play, found: Compared) -> None:
        served = recovery_class(verdict.served)
        if served.takes_snapshots:
            verdict.recovery = Recovery.SNAPSHOT
            but = [*found.volatile, *found.hash_order, *found.real]
        elif found.real:
            for difference in list(found.real.values())[:4]:
                verdict.why.append(f"request {difference.request}: {difference.path} {difference.how}")
        else:
            verdict.recovery = Recovery.REEXECUTE
            flags = () if served.repeats_requests else ("--deterministic",)
            volatile = ",".join(json_path.written(path) for path in found.volatile)
            verdict.options = (*flags, *(("--volatile", volatile) if volatile else ()))
            but = [*found.volatile, *found.hash_order]
        limit = self._servable.limit_advice()
        if limit is not None:
            verdict.options += limit.options
            verdict.limit = limit.text
        recovery = recovery_class(verdict.recovery)
        if recovery.survives_restart:
            shown = " ".join(map(shlex.quote, verdict.options)) or "no option"
            self._plan.progress(f"kill -9 in the middle, served with {shown}; then a fork")
            beside_parent = limit is None or limit.beside_parent
            verdict.why = self._survives(
                verdict.options, first, but, exact=not recovery.takes_snapshots, beside_parent=beside_parent
            )
        if verdict.why:
            verdict.recovery, verdict.options, verdict.outcome = Recovery.NONE, (), Outcome.IMPOSSIBLE
            verdict.snapshot_lines = snapshot_lines(self._servable)
        else:
            verdict.outcome = Outcome.VERIFIED

    # -- plays -----------------------------------------------------------------------------------------------------

    def _start(self, options: tuple[str, ...], hash_seed: str | None, data_dir: Path | None = None) -> ServerProcess:
        if data_dir is None:
            data_dir = Path(tempfile.mkdtemp(dir=self._scratch))
        return start_server(self._plan.target, data_dir, (*self._plan.options, *options), hash_seed)

    def _first(self, socket: Socket) -> _Play:
        """Play the recorded requests, or draw actions, each from the last answer.

        Raises:
            PlayFailed: A request failed, or the environment cannot be reset without arguments.
        """
        if self._plan.requests:
            requests = with_reset(self._plan.requests, self._plan.seed)
            return _Play(requests, [socket.make(request) for request in requests], socket.state())
        listed = socket.rpc("tools/list").get("result")
        tools = listed.get("tools", ()) if isinstance(listed, dict) else ()
        schema = self._servable.spec.action_cls.model_json_schema()
        actions = ActionGenerator(schema, self._plan.seed, tools)
        requests, answers = [], []

        def make(request: Request) -> dict[str, Any]:
            requests.append(request)
            answers.append(socket.make(request))
            return answers[-1]

        def reset() -> dict[str, Any]:
            number = len(requests)
            return make(Request("reset", {"seed": self._plan.seed + number, "episode_id": f"probe-{number}"}))

        answer = reset()
        if "error" in answer:
            raise PlayFailed(
                f"{self._servable.name} cannot be reset without arguments: {answer['error']['message']}; give a first "
                'line {"reset": {...}} with --actions FILE'
            )
        for number in range(self._plan.steps):
            if answer.get("done") is True or number < MORE_RESETS:
                reset()
            observation = answers[-1].get("observation")
            if tools and number % 3 == 2:
                name, arguments = actions.tool_call()
                answer = make(Request("mcp", {"name": name, "arguments": arguments}))
            else:
                drawn = actions.action(observation if isinstance(observation, dict) else {})
                answer = make(Request("step", drawn))
        return _Play(requests, answers, socket.state())

    def _replay(self, server: ServerProcess, requests: list[Request]) -> _Play:
        with Socket(server.url) as socket:
            return _Play(requests, [socket.make(request) for request in requests], socket.state())

    def _survives(
        self,
        options: tuple[str, ...],
        first: _Play,
        but: Sequence[json_path.Path],
        *,
        exact: bool,
        beside_parent: bool,
    ) -> list[str]:
        """Play with ``kill -9`` in the middle, and continue the session and a fork of it; return what went wrong.

        Args:
            options: Options to serve with.
            first: The uninterrupted play.
            but: Paths that may differ from it.
            exact: Compare the answers with the uninterrupted play; False for an environment that may be random.
            beside_parent: Continue the fork while its parent is open; False for one session at a time.

        Returns:
            One line for each problem, at most four; empty if all went well.
        """
        middle = _kill_point(first)
        before, after = first.requests[:middle], first.requests[middle:]
        data_dir = self._scratch / "advised"
        with self._start(options, None, data_dir) as server:
            with Socket(server.url) as socket:
                sid = socket.create_resumable_id()
                answers = [socket.make(request) for request in before]
                eid, t = socket.eid, socket.t
            child = fork(server.url, eid, t) if eid is not None and t is not None else None
            server.kill()
        with self._start(options, None, data_dir) as server:
            lost = self._continue(server, sid, after, answers)
            if lost:
                return [f"after kill -9: {lost}"]
            problems = remaining_differences(first.answers, answers, but) if exact else []
            if problems:
                return [f"after kill -9, request {p.request}: {p.path} {p.how}" for p in problems[:4]]
            if child is not None:
                of_child = answers[:middle]
                rest = [r for r in after[: _episode_length(after)] if r.kind != "reset"]
                with Socket(server.url, sid) if beside_parent else nullcontext():
                    lost = self._continue(server, child, rest, of_child)
                if lost:
                    return [f"in a fork: {lost}"]
                problems = remaining_differences(answers[: len(of_child)], of_child, but) if exact else []
                if problems:
                    return [f"in a fork, request {p.request}: {p.path} {p.how}" for p in problems[:4]]
        return []

    def _continue(
        self, server: ServerProcess, session_id: str, requests: Sequence[Request], answers: list[dict[str, Any]]
    ) -> str | None:
        """Send requests to a session that has to be recovered and append its answers; return why it was lost, if so."""
        try:
            with Socket(server.url, session_id) as socket:
                for request in requests:
                    answer = socket.make(request)
                    if answer.get("error", {}).get("code") == "SESSION_LOST":
                        return str(answer["error"]["message"])
                    answers.append(answer)
        except PlayFailed as error:
            return error.message
        return None


def _kill_point(play: _Play) -> int:
    """Return the index of the first request after the kill: about half-way, inside an episode if possible."""
    middle = max(2, len(play.requests) // 2)
    for at in range(middle, len(play.requests)):
        if play.requests[at].kind != "reset" and play.requests[at - 1].kind != "reset":
            return at
    return middle


def _episode_length(requests: Sequence[Request]) -> int:
    """Return the number of requests before the next reset."""
    return next((at for at, request in enumerate(requests) if request.kind == "reset"), len(requests))


def _differ(one: _Play, other: _Play) -> bool:
    answers: tuple[Answers, Answers] = (one.answers, other.answers)
    states: tuple[list[FieldDifference], ...] = (remaining_differences([one.state], [other.state], [("episode_id",)]),)
    return bool(remaining_differences(*answers, [])) or any(states)


def _shown_to_agent(answer: dict[str, Any]) -> Any:
    """Return the observation of an answer; of an error, the answer."""
    return answer.get("observation", answer)


__all__ = ["ENOUGH", "HASH_SEEDS", "STEPS", "Plan", "ServiceError", "probe"]
