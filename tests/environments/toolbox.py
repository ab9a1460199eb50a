"""Tools of a FastMCP server, one of them with state, behind OpenEnv's MCPEnvironment."""

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Observation, State


class ToolboxEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("toolbox")
        self._notes = []
        self._state = State(episode_id=None, step_count=0)

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @mcp.tool
        async def note(text: str) -> str:
            """Remember a text and return all."""
            self._notes.append(text)
            return " ".join(self._notes)

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._notes.clear()
        self._state = State(episode_id=episode_id or "tools", step_count=0)
        return Observation(metadata={"ready": True})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(metadata={"error": f"no tool action: {type(action).__name__}"})

    async def step_async(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        return await super().step_async(action, timeout_s=timeout_s, **kwargs)

    @property
    def state(self):
        return self._state
