"""mini-swe-agent on the terminal environment: mini_swe_agent.py MODEL TASK [URL]"""

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.exceptions import Submitted
from minisweagent.models import get_model
from pydantic import BaseModel

from terminal_env import TerminalEnv

FINISHED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Config(BaseModel):
    url: str = "http://127.0.0.1:8000"
    task_id: str


class ErrataEnvironment:
    """mini-swe-agent's `Environment`: its commands run in a sandbox of an Errata server, and each is journaled.

    An exception of the server or its machine leaves `execute`: it ends the run, and is no observation and no reward.
    """

    def __init__(self, **config):
        self.config = Config(**config)
        self.terminal = TerminalEnv(self.config.url).sync()
        self.terminal.connect()
        self.task = self.terminal.reset(task_id=self.config.task_id).observation.instruction
        self.reward = None
        self.errors = []  # (t, kind) of each marked turn

    def execute(self, action, cwd="", **_):
        command = f"cd {cwd} && {action['command']}" if cwd else action["command"]
        seen = self.terminal.run(command).observation
        if seen.error_kind is not None:
            self.errors.append((self.terminal.t, seen.error_kind))
        if seen.exit_code == 0 and seen.stdout.lstrip().startswith(FINISHED):
            self.reward = self.terminal.submit().reward
            told = {"exit_status": "Submitted", "submission": seen.stdout.lstrip().removeprefix(FINISHED).lstrip()}
            raise Submitted({"role": "exit", "content": told["submission"], "extra": told})
        killed = f"killed at its time limit of {seen.time_limit_s} s" if seen.timed_out else ""
        returncode = -1 if seen.exit_code is None else seen.exit_code
        return {"output": seen.stdout + seen.stderr, "returncode": returncode, "exception_info": killed}

    def get_template_vars(self, **more):
        machine = {
            "system": "Linux",
            "release": "",
            "version": "",
            "machine": "",
        }  # of the sandbox, not of this process
        return {**self.config.model_dump(), **machine, **more}

    def serialize(self):
        told = {"eid": self.terminal.eid, "reward": self.reward, "errors": self.errors}
        return {"info": {"config": {"environment": self.config.model_dump()}, "errata": told}}


def main(model, task_id, url="http://127.0.0.1:8000"):
    environment = ErrataEnvironment(task_id=task_id, url=url)
    config = get_config_from_spec("mini")
    agent = DefaultAgent(get_model(model, config.get("model")), environment, **{**config["agent"], "step_limit": 50})
    try:
        told = agent.run(environment.task)
    finally:
        environment.terminal.close()
    print(f"{told['exit_status']}: reward {environment.reward}, errors {environment.errors}")
    return environment.reward


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
