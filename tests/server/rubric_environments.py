"""Environments whose rewards are known at the end of the episode, with upstream's own rubrics."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.rubrics import ExponentialDiscountingTrajectoryRubric

from errata_protocol.environment import Snapshot


class Move(Action):
    """``win`` or ``lose`` ends the game; ``crash`` raises after it was judged; ``pass`` is not judged."""

    do: str = "go"


class Board(Observation):
    """What was done."""

    did: str = ""


class Outcome(ExponentialDiscountingTrajectoryRubric):
    """1 for a game that was won."""

    def score_trajectory(self, trajectory: list[Any]) -> float:
        return 1.0 if trajectory[-1][1].did == "win" else 0.0


class GameEnvironment(Environment[Move, Board, State]):
    """A game in the way of RFC 004: its rubric judges each step, and knows at the end what each was worth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(rubric=Outcome(gamma=0.5))
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Board:
        self._reset_rubric()
        self._state = State(episode_id=episode_id, step_count=0)
        return Board(did="reset")

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Board:
        self._state.step_count += 1
        board = Board(did=action.do, done=action.do in ("win", "lose"))
        if action.do != "pass":
            board.reward = self._apply_rubric(action, board)
        if action.do == "crash":
            raise RuntimeError("the board fell down")
        return board

    @property
    def state(self) -> State:
        return self._state


class TaskGameEnvironment(GameEnvironment):
    """Async, and its rubric depends on the task, so that it is made by reset."""

    def __init__(self) -> None:
        super().__init__()
        self.rubric = None

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Board:
        self.rubric = Outcome(gamma=0.5)
        return self.reset(seed, episode_id)

    async def step_async(self, action: Move, timeout_s: float | None = None, **_: Any) -> Board:
        return self.step(action)


class SavedGameEnvironment(GameEnvironment):
    """The same, recoverable: its snapshots hold the trajectory."""

    async def snapshot(self) -> Snapshot:
        assert isinstance(self.rubric, Outcome)
        return Snapshot(",".join(action.do for action, _ in self.rubric.trajectory).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        assert isinstance(self.rubric, Outcome)
        self.rubric._trajectory = [(Move(do=do), Board(did=do)) for do in snapshot.state.decode().split(",") if do]


class ForgetfulGameEnvironment(GameEnvironment):
    """Its rewards are no numbers."""

    class _Broken(Outcome):
        def compute_step_rewards(self) -> list[float]:
            return [float("nan")] * len(self.trajectory)

    def __init__(self) -> None:
        super().__init__()
        self.rubric = self._Broken()


class RaisingGameEnvironment(GameEnvironment):
    """Its rewards cannot be computed."""

    class _Broken(Outcome):
        def compute_step_rewards(self) -> list[float]:
            raise ValueError("no credit today")

    def __init__(self) -> None:
        super().__init__()
        self.rubric = self._Broken()
