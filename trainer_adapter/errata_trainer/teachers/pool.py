"""A pool of teachers that is asked about many states in the background.

The pool runs an event loop in a thread of its own: `TeacherPool.submit` returns at once, `Batch.result` waits for the
result. A teacher that fails is a missing vote and loses no pair. Nothing takes longer than the batch's deadline. Votes
are posted to the server in the background, where they can be seen with the episode.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Coroutine, Hashable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from errata_client import Episodes
from errata_protocol.errors import ErrataError, LocalProtocolError
from errata_protocol.replay import RewardPost, StateAt

from .actions import ActionKeys, KeyedAction, Unusable
from .ballot import Ask, Ballot, reward_post
from .budget import Budget
from .cache import AnswerCache, cache_key
from .prompts import NotReadable, Prompter
from .sharing import Shared
from .teacher import Answer, Prompt, Teacher, TeacherFailed
from .votes import TieBreak, Vote, vote

_log = logging.getLogger(__name__)

_READS = 16  # the server is the one that the rollouts step on
_CLOSING_S = 15.0
_LAST_POSTS_S = 5.0
_POSTING_S = 30.0


class Batch:
    """States that were submitted together, and later their ballots.

    Attributes:
        asks: Questions in the order in which they were given.
    """

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.asks = tuple(asks)
        self._future: Future[list[Ballot]] = Future()

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> list[Ballot]:
        """Wait for the ballots and return one for each ask, in order.

        Raises:
            TimeoutError: They are not there within ``timeout_s``; they still come.
        """
        return self._future.result(timeout_s)


class TeacherPool:
    """Asks teachers about states, and counts their votes.

    Args:
        teachers: Teachers with different names, in the order that ``tie_break="first"`` goes by. The pool closes them.
        prompter: Makes the teachers' prompts.
        keys: Computes the keys by which two actions are the same; by default those of the prompter's tools.
        budget: Limit of money and tokens; by default there is none.
        cache: Cache of answers; by default in memory, for this pool.
        episodes: The server's journal: states are read from it, and votes are posted to it. Without one, transcripts
            are read.
        post: Post the votes as late rewards of the source ``teachers``.
        min_agree: Votes that an action needs; see `vote`.
        tie_break: Rule for several leading actions; see `vote`.
        one_per_family: Whether the teachers of one family have one vote together.
        deadline_s: Time limit of a batch in seconds, from its submission. Teachers without an answer by then are
            missing votes.
        most_waiting: Most questions in the pool at the same time; those beyond are skipped as ``queue_full``, since a
            trainer never waits.

    Raises:
        ValueError: Two teachers have one name, an option has no meaning, or a teacher cannot keep the budget.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        prompter: Prompter,
        *,
        keys: ActionKeys | None = None,
        budget: Budget | None = None,
        cache: AnswerCache | None = None,
        episodes: Episodes | None = None,
        post: bool = True,
        min_agree: int | Literal["majority"] = 2,
        tie_break: TieBreak = "skip",
        one_per_family: bool = False,
        deadline_s: float = 120.0,
        most_waiting: int = 1024,
    ) -> None:
        names = [teacher.name for teacher in teachers]
        if len(set(names)) != len(names):
            raise ValueError(f"teachers have one name: {', '.join(sorted(names))}")
        if not deadline_s > 0 or most_waiting < 1:
            raise ValueError(f"deadline_s={deadline_s}, most_waiting={most_waiting}: nothing would ever be asked")
        vote([], None, min_agree=min_agree, tie_break=tie_break)  # raises for invalid options
        self.budget = budget if budget is not None else Budget()
        for teacher in teachers:
            teacher.check(self.budget)
        self._teachers = tuple(teachers)
        self._prompter = prompter
        self._keys = keys if keys is not None else ActionKeys(prompter.tools)
        self._cache = cache if cache is not None else AnswerCache()
        self._episodes = episodes
        self._post = post
        self._min_agree: int | Literal["majority"] = min_agree
        self._tie_break: TieBreak = tie_break
        self._families: list[Hashable] | None = [t.family for t in teachers] if one_per_family else None
        self._deadline_s = deadline_s
        self._most_waiting = most_waiting
        self._counts: Counter[str] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._waiting = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._batches: set[asyncio.Task[None]] = set()
        self._posts: set[asyncio.Task[None]] = set()
        self._answers: Shared[str, Answer] = Shared()
        self._reading = asyncio.Semaphore(_READS)

    def submit(self, asks: Sequence[Ask]) -> Batch:
        """Submit states, the most important first, and return at once. May be called from any thread.

        Raises:
            LocalProtocolError: The pool is closed.
        """
        batch = Batch(asks)
        with self._lock:
            if self._closed:
                raise LocalProtocolError("the pool of teachers is closed: make another")
            taken = min(len(asks), self._most_waiting - self._waiting)
            self._waiting += taken
            loop = self._running()
            loop.call_soon_threadsafe(_own, self._batches, self._run(batch, taken))
        return batch

    def metrics(self) -> dict[str, float]:
        """Return counts and costs since the pool was created.

        ``teachers/states``, ``teachers/pairs``; ``teachers/skipped/REASON``, states without a pair;
        ``teachers/failed/REASON``, missing votes; ``teachers/asked``, teachers at states, of which ``teachers/cached``
        cost nothing; ``teachers/states_not_read``, for which the transcript was taken; ``teachers/posted`` and
        ``teachers/not_posted``, rewards; ``teachers/usd``, ``teachers/tokens``, of the budget; ``teachers/waiting``.
        """
        with self._lock:
            counts = {f"teachers/{name}": float(count) for name, count in sorted(self._counts.items())}
            counts["teachers/waiting"] = float(self._waiting)
        spent = self.budget.spent
        return {**counts, "teachers/usd": spent.usd, "teachers/tokens": float(spent.tokens)}

    def close(self) -> None:
        """Close the pool: calls in flight are cancelled, and waiting states are skipped. Idempotent."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        if thread.is_alive():
            loop.call_soon_threadsafe(self._stop)
        thread.join(_CLOSING_S)
        if thread.is_alive():
            _log.warning("a teacher ignores that it is cancelled: its thread is left behind")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # On the pool's own loop from here on.

    def _running(self) -> asyncio.AbstractEventLoop:
        """Return the event loop; the first call starts it, so that the process may be forked before."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._ended = self._loop.create_future()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="teachers", daemon=True)
            self._thread.start()
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._live())
        finally:
            loop.close()

    async def _live(self) -> None:
        await self._ended
        await _cancelled(self._batches)
        if self._posts:  # of batches that had their result
            await asyncio.wait(self._posts, timeout=_LAST_POSTS_S)
        await _cancelled(self._posts)
        await self._answers.aclose()
        for teacher in self._teachers:
            await teacher.aclose()
        if self._episodes is not None:
            await self._episodes.aclose()

    def _stop(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _run(self, batch: Batch, taken: int) -> None:
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        histories: Shared[str, list[StateAt]] = Shared()
        tasks = [asyncio.create_task(self._ballot(ask, deadline, histories)) for ask in batch.asks[:taken]]
        reason = "closed"
        try:
            if tasks:
                # Each ends at the deadline by itself; the second more is for putting away what it waited for.
                await asyncio.wait(tasks, timeout=self._deadline_s + 1.0)
            reason = "deadline"
        finally:
            ballots = [_outcome(ask, task, reason) for ask, task in zip(batch.asks, tasks, strict=False)]
            ballots += [_skip(ask, "queue_full") for ask in batch.asks[taken:]]
            self._finish(batch, ballots, taken)
            _own(self._posts, self._publish(ballots))
            await _cancelled(tasks)
            await histories.aclose()

    def _finish(self, batch: Batch, ballots: list[Ballot], taken: int) -> None:
        with self._lock:
            self._waiting -= taken
            for ballot in ballots:
                self._counts["states"] += 1
                self._counts["pairs"] += len(ballot.vote.pairs)
                if not ballot.vote.pairs:
                    self._counts[f"skipped/{ballot.vote.reason}"] += 1
                for reason in ballot.failures.values():
                    self._counts[f"failed/{reason}"] += 1
        batch._future.set_result(ballots)

    async def _ballot(self, ask: Ask, deadline: float, histories: Shared[str, list[StateAt]]) -> Ballot:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline):
                prompt = await self._prompt(ask, histories)
        except TimeoutError:
            return _skip(ask, "deadline")
        if prompt is None:
            return _skip(ask, "no_state")
        student = self._keys.keyed(ask.student, cwd=prompt.cwd) if ask.student is not None else None
        asked = {asyncio.create_task(self._answer(teacher, prompt)): teacher for teacher in self._teachers}
        actions: dict[str, KeyedAction] = {}
        failures: dict[str, str] = {}
        try:
            if asked:
                await asyncio.wait(asked, timeout=max(0.0, deadline - loop.time()))
        finally:
            for task, teacher in asked.items():
                if not task.done():
                    failures[teacher.name] = "deadline"
                else:
                    self._read(task, teacher, prompt, actions, failures)
            await _cancelled(asked)
        # In the teachers' order, which a dict of finished ones has lost.
        votes = [actions.get(teacher.name) for teacher in self._teachers]
        found = vote(votes, student, min_agree=self._min_agree, tie_break=self._tie_break, families=self._families)
        return Ballot(ask, found, student, actions, failures, prompt.source)

    def _read(
        self,
        task: asyncio.Task[Answer],
        teacher: Teacher,
        prompt: Prompt,
        actions: dict[str, KeyedAction],
        failures: dict[str, str],
    ) -> None:
        """Store the answer of a teacher, or the reason why there is none."""
        try:
            action = task.result().action()
            self._keys.check(action)
            actions[teacher.name] = self._keys.keyed(action, cwd=prompt.cwd)
        except (TeacherFailed, Unusable) as error:
            failures[teacher.name] = error.reason
            self._warn(teacher.name, error.reason, "teacher %s has no vote: %s", teacher.name, error)
        except asyncio.CancelledError:
            failures[teacher.name] = "cancelled"
        except Exception as error:
            failures[teacher.name] = "error"
            _log.warning("teacher %s has no vote", teacher.name, exc_info=error)

    async def _answer(self, teacher: Teacher, prompt: Prompt) -> Answer:
        """Return a teacher's answer: from the cache, from an equal call in flight, or from a new call."""
        key = cache_key(prompt, teacher.identity)
        with self._lock:
            self._counts["asked"] += 1
        if (cached := self._cache.get(key)) is not None:
            with self._lock:
                self._counts["cached"] += 1
            return cached

        async def ask() -> Answer:
            answer = await teacher.ask(prompt, self.budget)
            try:
                self._keys.check(answer.action())
            except Unusable:
                return answer  # a failure: it is counted by `_read`, and asked again next time
            try:
                self._cache.put(key, answer)
            except OSError as error:
                _log.warning("an answer cannot be cached: %s", error)
            return answer

        return await self._answers.get(f"{teacher.name} {prompt.state_digest} {prompt.tools_digest}", ask)

    async def _prompt(self, ask: Ask, histories: Shared[str, list[StateAt]]) -> Prompt | None:
        """Return the prompt, from the exact payloads if they are there, else from the transcript; None without
        either."""
        episodes, eid = self._episodes, ask.eid
        if episodes is not None and eid is not None and ask.t is not None:
            try:
                async with self._reading:
                    states = await histories.get(eid, lambda: self._history(episodes, eid))
                upto = [state for state in states if state.eid != ask.eid or state.t <= (ask.t or 0)]
                return self._prompter.from_states(upto, ask.turns, ask.prompt)
            except (ErrataError, ConnectionError, TimeoutError, NotReadable) as error:
                self._not_read(error)
        if ask.transcript is None:
            return None
        return self._prompter.from_transcript(ask.transcript, ask.cwd)

    async def _history(self, episodes: Episodes, eid: str) -> list[StateAt]:
        version = self._prompter.agent_text_version
        if version is not None:
            shown = (await episodes.episode(eid)).agent_text_version
            if shown is not None and shown != version:
                raise NotReadable(f"episode {eid} was shown by agent_text {shown}, here is {version}")
        return await episodes.history(eid)

    def _not_read(self, error: Exception) -> None:
        with self._lock:
            self._counts["states_not_read"] += 1
        why = f"reading:{type(error).__name__}"
        self._warn("", why, "a state cannot be read from the journal (%s): transcripts are used", error)

    def _warn(self, teacher: str, reason: str, message: str, *values: Any) -> None:
        """Log the first failure of each kind."""
        if (teacher, reason) not in self._warned:
            self._warned.add((teacher, reason))
            _log.warning(message, *values)

    async def _publish(self, ballots: list[Ballot]) -> None:
        """Post the votes, one episode at a time. Failures are counted, and change no vote."""
        if self._episodes is None or not self._post:
            return
        posts: dict[str, list[RewardPost]] = {}
        for ballot in ballots:
            if (post := reward_post(ballot)) is not None:
                posts.setdefault(str(ballot.ask.eid), []).append(post)
        for eid, rewards in posts.items():
            outcome = "posted"
            try:
                async with asyncio.timeout(_POSTING_S):
                    await self._episodes.post_rewards(eid, rewards)
            except (ErrataError, ConnectionError, TimeoutError) as error:
                outcome = "not_posted"
                self._warn("", f"posting:{type(error).__name__}", "votes were not posted: %s", error)
            with self._lock:
                self._counts[outcome] += len(rewards)


def _outcome(ask: Ask, task: asyncio.Task[Ballot], reason: str) -> Ballot:
    """Return the ballot of a finished task; a skipped one if it has none."""
    if not task.done() or task.cancelled():
        return _skip(ask, reason)
    if (error := task.exception()) is not None:
        _log.error("a state was not asked about", exc_info=error)
        return _skip(ask, "error")
    return task.result()


def _own(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Start a task on the running loop and keep a reference until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end; their exceptions are ignored."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)


def _skip(ask: Ask, reason: str) -> Ballot:
    return Ballot(ask, Vote((), reason))
