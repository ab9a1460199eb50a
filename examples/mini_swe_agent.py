"""Runs mini-swe-agent on a task of an Errata server.

    python examples/mini_swe_agent.py MODEL TASK [URL [terminal|swe_bench_lite]]

The agent's commands run in a sandbox of the server, and the server journals each of them.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.exceptions import LimitsExceeded, Submitted
from minisweagent.models import get_model
from pydantic import BaseModel

import swe_bench_lite_env
import terminal_env

FINISHED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The agent prints this line when it has finished; its system prompt says so."""


class Served(NamedTuple):
    """How to use an environment of the server.

    Attributes:
        client: Class of the client.
        agent_text: Returns the text that the agent reads of an observation.
        task_argument: The argument of ``reset`` that names a task.
    """

    client: type
    agent_text: Callable
    task_argument: str


ENVIRONMENTS = {
    "terminal": Served(terminal_env.TerminalEnv, terminal_env.agent_text, "task_id"),
    "swe_bench_lite": Served(swe_bench_lite_env.SweBenchLiteEnv, swe_bench_lite_env.agent_text, "instance_id"),
}


class Config(BaseModel):
    """Configuration of `ErrataEnvironment`."""

    url: str = "http://127.0.0.1:8000"
    environment: str = "terminal"
    task: str


class ErrataEnvironment:
    """Implements mini-swe-agent's ``Environment``.

    An exception of the server or of its machine is not caught here: it ends the run, and becomes neither an observation
    nor a reward.

    Attributes:
        task: The text of the task.
        reward: The task's score; None before the episode has ended.
        errors: (t, kind) of each turn that the server marked as an error.
    """

    def __init__(self, **config):
        self.config = Config(**config)
        served = ENVIRONMENTS[self.config.environment]
        self.agent_text = served.agent_text
        self.client = served.client(self.config.url).sync()
        self.client.connect()
        first = self.client.reset(**{served.task_argument: self.config.task})
        self.task = self.agent_text(first.observation)
        self.reward = None
        self.errors = []

    def execute(self, action, cwd="", **_):
        """Run the command of an action, and return its output for the agent.

        Raises:
            LimitsExceeded: A budget of the episode is used up.
            Submitted: The agent has finished; its work was submitted and graded.
        """
        command = action["command"]
        if cwd:
            command = f"cd {cwd} && {command}"
        result = self.client.run(command)
        observation = result.observation
        output = self.agent_text(observation)

        if observation.error_kind is not None:
            self.errors.append((self.client.t, observation.error_kind))
        if result.done:
            self.reward = result.reward
            raise LimitsExceeded(exit_message("LimitsExceeded", output))
        printed = observation.stdout.lstrip()
        if observation.exit_code == 0 and printed.startswith(FINISHED):
            self.reward = self.client.submit().reward
            raise Submitted(exit_message("Submitted", printed.removeprefix(FINISHED).lstrip()))

        timed_out = f"killed at its time limit of {observation.time_limit_s} s" if observation.timed_out else ""
        exit_code = -1 if observation.exit_code is None else observation.exit_code
        return {"output": output, "returncode": exit_code, "exception_info": timed_out}

    def get_template_vars(self, **more):
        """Return variables for the agent's prompts. They describe the sandbox, not the machine of this process."""
        sandbox = {"system": "Linux", "release": "", "version": "", "machine": ""}
        return {**self.config.model_dump(), **sandbox, **more}

    def serialize(self):
        """Return what mini-swe-agent saves with the trajectory."""
        config = {"environment": self.config.model_dump()}
        outcome = {"eid": self.client.eid, "reward": self.reward, "errors": self.errors}
        return {"info": {"config": config, "errata": outcome}}


def exit_message(status, submission):
    """Return the message that ends a run of mini-swe-agent."""
    return {"role": "exit", "content": submission, "extra": {"exit_status": status, "submission": submission}}


def main(model, task, url="http://127.0.0.1:8000", environment="terminal"):
    """Run the agent on one task; print how it ended and return the reward."""
    errata = ErrataEnvironment(task=task, url=url, environment=environment)
    config = get_config_from_spec("mini")
    agent_config = {**config["agent"], "step_limit": 50}
    agent = DefaultAgent(get_model(model, config.get("model")), errata, **agent_config)
    try:
        end = agent.run(errata.task)
    finally:
        errata.client.close()
    print(f"{end['exit_status']}: reward {errata.reward}, errors {errata.errors}")
    return errata.reward


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4, 5):
        sys.exit(__doc__)
    main(*sys.argv[1:])
