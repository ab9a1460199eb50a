"""mini-swe-agent on an Errata server: mini_swe_agent.py MODEL TASK [URL [terminal|swe_bench_lite]]"""

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.exceptions import LimitsExceeded, Submitted
from minisweagent.models import get_model
from pydantic import BaseModel

import swe_bench_lite_env
import terminal_env

FINISHED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ENVIRONMENTS = {  # client, what the agent reads of an observation, and the argument of reset that names a task
    "terminal": (terminal_env.TerminalEnv, terminal_env.agent_text, "task_id"),
    "swe_bench_lite": (swe_bench_lite_env.SweBenchLiteEnv, swe_bench_lite_env.agent_text, "instance_id"),
}


class Config(BaseModel):
    url: str = "http://127.0.0.1:8000"
    environment: str = "terminal"
    task: str


class ErrataEnvironment:
    """mini-swe-agent's `Environment`: its commands run in a sandbox of an Errata server, and each is journaled.

    An exception of the server or its machine leaves `execute`: it ends the run, and is no observation and no reward.
    """

    def __init__(self, **config):
        self.config = Config(**config)
        client, self.text, argument = ENVIRONMENTS[self.config.environment]
        self.client = client(self.config.url).sync()
        self.client.connect()
        self.task = self.text(self.client.reset(**{argument: self.config.task}).observation)
        self.reward = None
        self.errors = []  # (t, kind) of each marked turn

    def execute(self, action, cwd="", **_):
        command = f"cd {cwd} && {action['command']}" if cwd else action["command"]
        result = self.client.run(command)
        seen, output = result.observation, self.text(result.observation)
        if seen.error_kind is not None:
            self.errors.append((self.client.t, seen.error_kind))
        if result.done:  # a budget of the episode is spent
            self.reward = result.reward
            raise LimitsExceeded(self.exit("LimitsExceeded", output))
        if seen.exit_code == 0 and seen.stdout.lstrip().startswith(FINISHED):
            self.reward = self.client.submit().reward
            raise Submitted(self.exit("Submitted", seen.stdout.lstrip().removeprefix(FINISHED).lstrip()))
        killed = f"killed at its time limit of {seen.time_limit_s} s" if seen.timed_out else ""
        return {
            "output": output,
            "returncode": -1 if seen.exit_code is None else seen.exit_code,
            "exception_info": killed,
        }

    def exit(self, status, submission):
        return {"role": "exit", "content": submission, "extra": {"exit_status": status, "submission": submission}}

    def get_template_vars(self, **more):
        machine = {
            "system": "Linux",
            "release": "",
            "version": "",
            "machine": "",
        }  # of the sandbox, not of this process
        return {**self.config.model_dump(), **machine, **more}

    def serialize(self):
        outcome = {"eid": self.client.eid, "reward": self.reward, "errors": self.errors}
        return {"info": {"config": {"environment": self.config.model_dump()}, "errata": outcome}}


def main(model, task, url="http://127.0.0.1:8000", environment="terminal"):
    errata = ErrataEnvironment(task=task, url=url, environment=environment)
    config = get_config_from_spec("mini")
    agent = DefaultAgent(get_model(model, config.get("model")), errata, **{**config["agent"], "step_limit": 50})
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
