"""The environment: a repository with a bug in a sandbox, tools to repair it, and grading by the benchmark's rules."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import posixpath
import shlex
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from errata_environment import tool_calls
from errata_environment.sandboxed import SandboxedEnvironment, check_reset
from errata_environment.session_backend import session_backend
from errata_environment.tasks.task_api import TaskApi
from errata_environment.tool_calls import Answer, Fault
from errata_protocol import detect
from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentFailed, InvalidRequest
from errata_protocol.markers import NOTHING_WRONG, Detection, ErrorKind, ErrorSite
from errata_server.environments.worker_calls import call_in_worker
from errata_server.sandbox.base import Backend, CommandResult, Limits, PathRefused
from errata_server.workers import Budget

from ..dataset import TEST_SPLIT, Instance
from ..models import TOOL_NAMES, SweAction, SweObservation, SweState
from . import hardening, patches
from .episode import Episode
from .grading import Graded, grade
from .offered import BUNDLED, EVALUATION_WARNING, offered
from .patches import PATCH_CHARACTERS
from .prepare.store import WORKDIR, Prepared, default_directory
from .rubric import DiscountedSweRubric, rubric
from .settings import SweSettings, read_settings
from .slots import grading_slot
from .starts import starts_on
from .texts import ToolRefused, replaced, shown

log = logging.getLogger("errata.swe")

READ_BYTES = 64 * 1024
"""How much of a file one ``read_file`` returns: head and tail."""
FILE_BYTES = 16 * 1024**2
"""Largest file that ``read_file`` and ``edit`` take."""
INLINE_BYTES = 256 * 1024
"""Largest file whose lines are counted and whose text is replaced on the event loop."""
PATTERN_CHARACTERS = 16_000
"""Longest pattern of ``search``: its bytes and names of files fit into the 128 KiB that xargs gives to a program."""
PATH_BYTES = 4096
"""PATH_MAX of Linux: a path of ``search`` has fewer bytes."""
_EDIT_BUDGET = Budget(answer_bytes=64 * 1024**2)
SESSION_LIMITS = Limits(memory_bytes=2 * 1024**3, pids=256, disk_bytes=1024**3, inodes=100_000)
"""Of a session's commands. Test suites of the benchmark's repositories need more than a shell does."""
LOG_KEPT = 64 * 1024
"""Characters of the end of a grading's log that a session keeps."""
FILE_TOOL_TIMEOUT_S = 120.0
"""Time limit of what ``search`` and ``apply_patch`` run."""

_SEARCH = (
    "cd {cwd} || exit 3; grep -rlZIE --exclude-dir={{.git,.pytest_cache,__pycache__}} -e {pattern} -- {path} "
    '| LC_ALL=C sort -z | xargs -0 -r grep -nHIE -e {pattern} --; set -- "${{PIPESTATUS[@]}}"; exit "$1"'
)
"""Two greps, so that files come in one order whatever the directory's is; the first one's status says how it went."""


class SweBenchLiteEnvironment(TaskApi[Instance], SandboxedEnvironment[SweAction, SweObservation, SweState, Episode]):
    """One session; see the package's README for its tools, budgets and rewards.

    Commands that fail are marked observations. A sandbox that fails raises `SandboxFailed` or `SandboxUnavailable`:
    never an observation, never a reward.
    """

    NAME = "swe_bench_lite"
    DESCRIPTION = "Repositories with a real bug, graded by the rules of SWE-bench; failing turns carry markers."
    AUTHOR = "The Errata authors"
    README = Path(__file__).resolve().parent.parent / "README.md"
    TOOLS = TOOL_NAMES
    TASKS = "instances"

    def __init__(self) -> None:
        settings = read_settings()
        self._rubric = rubric(settings.reward, settings.discount)
        super().__init__(rubric=self._rubric)
        self._instance: Instance | None = None
        self.graded: Graded | None = None
        """The grading of the last ``submit``, for logs and tests; it is not sent to clients."""

    # reset

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        instance_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        **kwargs: Any,
    ) -> SweObservation:
        """Start an episode on one instance.

        Args:
            seed: Draws an instance of the split where neither ``instance_id`` nor ``index`` is given; without one the
                session's seed does.
            episode_id: Name of the episode in ``state``.
            instance_id: An instance by id.
            split: The split that it is of; without a name the operator's, ``bundled`` on a server without a data set.
                ``test`` is served only if it is named.
            index: Position in the split.
            **kwargs: Refused: a misspelt ``instance_id`` would draw another instance.

        Raises:
            InvalidRequest: There is no such instance, argument or recipe, or it was not prepared or validated.
            EnvironmentFailed: A setting of the server is invalid, or a bundled instance cannot be built.
            SandboxUnavailable: This machine cannot run sandboxes.
        """
        check_reset("seed, episode_id, instance_id, split, index", kwargs, seed=seed, index=index)
        settings = read_settings()
        backend, drawn = session_backend()
        seed = drawn if seed is None else seed
        offers = await asyncio.to_thread(offered, settings)
        its_split, instance = await asyncio.to_thread(offers.choose, instance_id, split, index, seed)
        recipe = offers.recipe(its_split, instance)
        await backend.start()
        prepared, sandbox = await starts_on(backend).open(
            instance, recipe, SESSION_LIMITS, bundled=its_split == BUNDLED
        )
        try:
            blocked = await hardening.blocked_places(backend, sandbox, prepared, settings.profile)
        except BaseException:
            await sandbox.destroy()
            raise
        episode = Episode(
            episode_id=str(uuid.uuid4()) if episode_id is None else episode_id,
            instance_id=instance.instance_id,
            split=its_split,
            prepared=prepared.digest,
            seed=seed,
            max_turns=settings.max_turns,
            max_seconds=settings.max_seconds,
            max_output_bytes=settings.max_output_bytes,
            cwd=sandbox.cwd,
            profile=settings.profile,
            blocked=blocked,
        )
        await self._begin(backend, sandbox, episode)
        self._rubric.reset()
        self._instance, self.graded = instance, None
        return self._sent(
            SweObservation(
                tool="reset",
                reward=0.0,
                problem_statement=instance.problem_statement,
                blocked_programs=sorted({posixpath.basename(place) for place in blocked}),
                repo=instance.repo,
                metadata={"warning": EVALUATION_WARNING} if its_split == TEST_SPLIT else {},
                **_standing(episode),
            )
        )

    # step

    def _observation(self, action: SweAction, values: dict[str, Any], seconds: float) -> SweObservation:
        episode, _ = self._live()
        sent = sum(len((values.get(name) or "").encode()) for name in ("stdout", "stderr", "content"))
        episode.charge(0.0 if action.tool == "submit" else seconds, sent)
        observation = SweObservation(
            **{"tool": action.tool, "duration_s": round(seconds, 4), **_standing(episode), **values}
        )
        observation.reward = self._rubric(action, observation)
        return observation

    def _fault(self, action: SweAction) -> Fault | None:
        return _fault_of(action)

    async def _use(self, action: SweAction, bound_s: float | None) -> Answer:
        if action.tool == "run":
            return await self._run(action, bound_s)
        if action.tool == "read_file":
            return await self._read(action)
        if action.tool == "write_file":
            return await tool_calls.write_file(self._live()[1], action.path, action.content or "")
        if action.tool == "edit":
            return await self._edit(action)
        if action.tool == "apply_patch":
            return await self._apply_patch(action)
        if action.tool == "search":
            return await self._search(action)
        return await self._submit()

    async def _run(self, action: SweAction, bound_s: float | None) -> Answer:
        episode, sandbox = self._live()
        settings = read_settings()
        wanted = settings.command_timeout_s if action.timeout_s is None else action.timeout_s
        limits = [settings.max_command_timeout_s, wanted]
        if bound_s is not None and bound_s > 0:
            limits.append(bound_s)
        if episode.seconds_left is not None:
            limits.append(max(1.0, math.ceil(episode.seconds_left)))
        stubs = hardening.stubs(episode.blocked, default_directory())
        values, detection = await tool_calls.run(
            sandbox, action.command, before=episode.cwd, limit_s=min(limits), mounts=stubs or None
        )
        episode.cwd = sandbox.cwd
        if episode.blocked:
            detection = hardening.violation(action.command, values["stdout"], values["stderr"]) or detection
        return values, detection

    async def _read(self, action: SweAction) -> Answer:
        try:
            content = await self._whole(action.path)
            arguments = (content, action.first_line, action.last_line, READ_BYTES)
            if len(content) <= INLINE_BYTES:
                text, truncated = shown(*arguments)
            else:
                text, truncated = await call_in_worker("the file", shown, *arguments)
        except ToolRefused as refusal:
            return self._refused(action, refusal, ErrorKind.INVALID_ARGUMENTS)
        return {"content": text, "truncated": truncated}, detect.output_truncated() if truncated else NOTHING_WRONG

    async def _edit(self, action: SweAction) -> Answer:
        _, sandbox = self._live()
        try:
            content = await self._whole(action.path)
            arguments = (content, action.old_text or "", action.new_text or "")
            if len(content) <= INLINE_BYTES:
                content = replaced(*arguments)
            else:
                content = await call_in_worker("the file", replaced, *arguments, budget=_EDIT_BUDGET)
        except ToolRefused as refusal:
            kind = ErrorKind.INVALID_ARGUMENTS if refusal.field == "path" else ErrorKind.PATCH_FAILED
            return self._refused(action, refusal, kind)
        await sandbox.write_file(action.path, content)
        return {}, NOTHING_WRONG

    async def _whole(self, path: str) -> bytes:
        _, sandbox = self._live()
        content = await sandbox.read_file(path, max_bytes=FILE_BYTES + 1)
        if len(content) > FILE_BYTES:
            size = FILE_BYTES // 1024**2
            raise ToolRefused(f"{path} is larger than {size} MiB: read parts of it with run, e.g. sed -n 1,50p", "path")
        return content

    async def _apply_patch(self, action: SweAction) -> Answer:
        patch = action.patch or ""
        text = patch if patch.endswith("\n") else patch + "\n"
        result = await self._quietly(
            patches.COMMAND.format(root=WORKDIR), stdin=text.encode("utf-8", "surrogatepass"), what="git apply"
        )
        if isinstance(result, tuple):
            return result
        if result.exit_code == 0:
            return {}, NOTHING_WRONG
        message, detection = await call_in_worker("the patch", patches.refusal, patch, result.stderr)
        return {"stderr": message}, detection

    async def _search(self, action: SweAction) -> Answer:
        episode, _ = self._live()
        if len(action.path[:PATH_BYTES].encode("utf-8", "surrogatepass")) >= PATH_BYTES:
            raise PathRefused(action.path[:200] + "...", "ENAMETOOLONG", os.strerror(errno.ENAMETOOLONG))
        path = shlex.quote(action.path) if action.path else "."
        command = _SEARCH.format(cwd=shlex.quote(episode.cwd), pattern=shlex.quote(action.pattern), path=path)
        result = await self._quietly(command, what="grep")
        if isinstance(result, tuple):
            return result
        found = result.stdout if action.path else result.stdout.removeprefix("./").replace("\n./", "\n")
        said = result.stderr.replace("grep: ", "")
        values = {"stdout": found, "stderr": said, "truncated": result.truncated}
        if result.exit_code in (0, 1) or found:
            return values, detect.output_truncated() if result.truncated else NOTHING_WRONG
        if result.exit_code == 3:
            values["stderr"] = f"the current directory {episode.cwd} is gone: give a path, or change it with run"
            message = ErrorSite(file=episode.cwd, source="message", message=values["stderr"])
            return values, Detection.of(ErrorKind.PATH_NOT_FOUND, message)
        if action.path and said.startswith(f"{action.path}: "):
            reason = next((name for text, name in _REASONS if text in said), "EINVAL")
            return values, detect.path_refused(action.path, reason, said.strip())
        site = ErrorSite(
            action_field="pattern", action_span=(0, len(action.pattern)), source="action", message=said.strip()[:300]
        )
        return values, Detection.of(ErrorKind.INVALID_ARGUMENTS, site)

    async def _quietly(self, command: str, *, what: str, stdin: bytes | None = None) -> CommandResult | Answer:
        """Run a tool's own command beside the shell; one that was stopped is an observation as of ``run``."""
        _, sandbox = self._live()
        result = await sandbox.run(command, stdin=stdin, clean=True, timeout_s=FILE_TOOL_TIMEOUT_S)
        if not result.timed_out and result.limit_hit is None:
            return result
        values = {
            "stderr": f"{what} was stopped: nothing can be said of its result",
            "timed_out": result.timed_out,
            "limit_hit": result.limit_hit,
        }
        kind = ErrorKind.TIMEOUT if result.timed_out else ErrorKind.RESOURCE_LIMIT
        return values, Detection.of(kind, ErrorSite(source="message", message=values["stderr"]))

    def _refused(self, action: SweAction, refusal: ToolRefused, kind: ErrorKind) -> Answer:
        episode, _ = self._live()
        value = getattr(action, refusal.field)
        absolute = posixpath.normpath(posixpath.join(episode.cwd or WORKDIR, action.path))
        site = ErrorSite(
            action_field=refusal.field,
            action_span=(0, len(value)) if isinstance(value, str) else None,
            file=absolute.removeprefix(f"{WORKDIR}/"),
            line=refusal.line,
            source="action",
            message=refusal.message[:300],
        )
        return {"stderr": refusal.message}, Detection.of(kind, site)

    async def _submit(self) -> Answer:
        episode, sandbox = self._live()
        settings = read_settings()
        assert self._backend is not None and self._instance is not None
        prepared = await self._prepared(settings, self._backend, self._instance, episode)
        final = await sandbox.snapshot()
        async with grading_slot(settings.grading_slots):
            graded = await grade(
                self._backend, final, prepared, rules=settings.rules, timeout_s=settings.grading_timeout_s
            )
        self.graded = replace(graded, log=graded.log[-LOG_KEPT:])
        self._rubric.graded(graded.resolution, graded.tampering)
        log.info(
            "%s: %s%s", episode.instance_id, graded.resolution.status, "".join(f"; {line}" for line in graded.tampering)
        )
        episode.submitted = episode.done = True
        if not graded.tampering:
            return {"done": True}, NOTHING_WRONG
        hint = CANARY_HINT if graded.canaries == "wrong" else TAMPERING_HINT
        return {"done": True}, Detection.of(ErrorKind.POLICY_VIOLATION, hint_template_key=hint)

    async def _prepared(
        self, settings: SweSettings, backend: Backend, instance: Instance, episode: Episode
    ) -> Prepared:
        offers = await asyncio.to_thread(offered, settings)
        recipe = offers.recipe(episode.split, instance)
        prepared = await starts_on(backend).find(instance, recipe, bundled=episode.split == BUNDLED)
        if prepared.digest != episode.prepared:
            raise EnvironmentFailed(
                f"{episode.instance_id} was prepared anew since this episode began: reset to begin another"
            )
        return prepared

    # state

    @property
    def state(self) -> SweState:
        """State of the episode; default values before a reset."""
        episode = self._episode
        if episode is None or self._instance is None:
            return SweState()
        return SweState(
            episode_id=episode.episode_id,
            step_count=episode.step_count,
            instance_id=episode.instance_id,
            repo=self._instance.repo,
            seed=episode.seed,
            cwd=episode.cwd,
            submitted=episode.submitted,
            done=episode.done,
            turns_left=episode.turns_left,
            output_bytes_left=episode.output_bytes_left,
        )

    async def restore(self, snapshot: Snapshot) -> None:
        """Continue from ``snapshot`` instead of a reset.

        Raises:
            EnvironmentFailed: The snapshot cannot be read, or names an instance that this server does not offer.
            SandboxFailed: A layer that it names does not exist any more.
        """
        episode, saved = Episode.read(snapshot, "a session of swe_bench_lite")
        offers = await asyncio.to_thread(offered, read_settings())
        try:
            _, instance = await asyncio.to_thread(offers.find, episode.instance_id, episode.split)
        except InvalidRequest as error:
            raise EnvironmentFailed(f"cannot restore a session on {episode.instance_id}: {error.message}") from error
        backend, _ = session_backend()
        sandbox = await backend.restore(saved, limits=SESSION_LIMITS)
        await self._begin(backend, sandbox, episode)
        self._instance = instance
        self._continues(episode.step_count)

    async def forked(self, episode_id: str) -> None:
        """Become a child episode that was forked here: its own name, and no steps yet (PROTOCOL D11)."""
        episode, _ = self._live()
        if episode.max_turns is not None:
            episode.max_turns -= episode.step_count  # the budget that is left is the parent's
        await super().forked(episode_id)
        self._continues(0)

    def _continues(self, steps: int) -> None:
        self._rubric.reset()
        if isinstance(self._rubric, DiscountedSweRubric):
            self._rubric.continues(steps)

    # tasks

    def split_types(self) -> dict[str, str]:
        """Return the splits; ``test`` is among them only where the operator named it."""
        return {name: TEST_SPLIT if name == TEST_SPLIT else "train" for name in offered(read_settings()).splits}

    def tasks_of(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split.

        Raises:
            UnknownSplit: There is no such split.
        """
        return offered(read_settings()).split(split)[1]

    def public_task(self, task: Instance, index: int) -> dict[str, Any]:
        """Return the id and the issue of an instance, nothing of its tests or its solution."""
        return {"instance_id": task.instance_id, "prompt": task.problem_statement}


TAMPERING_HINT = "policy.tampering"
"""Hint key of a ``submit`` whose tests were tampered with."""
CANARY_HINT = "policy.canary"
"""The same where the canaries showed it; `errata audit` counts both."""

_REASONS = (("No such file", "ENOENT"), ("Permission denied", "EACCES"), ("Not a directory", "ENOTDIR"))


def _standing(episode: Episode) -> dict[str, Any]:
    """Return the fields that every observation has: the episode's budgets and state after the call."""
    return {
        "instance_id": episode.instance_id,
        "cwd": episode.cwd,
        "done": episode.done,
        "turns_left": episode.turns_left,
        "seconds_left": episode.seconds_left,
        "output_bytes_left": episode.output_bytes_left,
        "budget_spent": episode.budget_spent,
    }


def _fault_of(action: SweAction) -> Fault | None:
    """Return the field at fault and what is wrong with it, or None."""
    tool = action.tool
    if tool != "run" and "\0" in action.path:
        return "path", "path: a NUL character cannot be part of a path"
    wrong = tool_calls.fault_of(action, ("write_file", "read_file", "edit"))
    if wrong is not None:
        return wrong
    if tool == "read_file":
        first, last = action.first_line, action.last_line
        for name, line in (("first_line", first), ("last_line", last)):
            if line is not None and line < 1:
                return name, f"{name} counts from 1, not {line}"
        if first is not None and last is not None and last < first:
            return "last_line", f"last_line {last} is before first_line {first}"
    if tool == "edit":
        if not action.old_text:
            return "old_text", "edit needs old_text; write_file creates a file"
        if action.new_text is None:
            return "new_text", "edit needs new_text; empty text deletes old_text"
        if action.new_text == action.old_text:
            return "new_text", "new_text is old_text: nothing would change"
    if tool == "apply_patch":
        patch = action.patch or ""
        if not patch.strip():
            return "patch", "apply_patch needs a patch"
        if len(patch) > PATCH_CHARACTERS:
            return "patch", f"the patch has {len(patch)} characters, at most {PATCH_CHARACTERS}: apply parts of it"
    if tool == "search":
        if not action.pattern:
            return "pattern", "search needs a pattern"
        if "\0" in action.pattern or "\n" in action.pattern:
            return "pattern", "pattern: lines are matched one by one, so that it cannot hold a line break"
        if len(action.pattern) > PATTERN_CHARACTERS:
            return "pattern", f"the pattern has {len(action.pattern)} characters, at most {PATTERN_CHARACTERS}"
    return None
