"""Run by the Python that has mini-swe-agent: its agent and its scripted model on examples/mini_swe_agent.py.

The only argument is a JSON object: ``task``, ``url``, ``environment`` and the ``commands`` of the model in order.
Prints one with the ``reward``, the ``messages`` that the agent kept, and its ``version``.
"""

import json
import runpy
import sys
from importlib.metadata import version
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.models.test_models import DeterministicModel, make_output

EXAMPLE = Path(__file__).parents[2] / "examples" / "mini_swe_agent.py"


def play(task, url, environment, commands):
    """Return what the example's `main` returned, and the messages."""
    agents = []

    class Kept(DefaultAgent):
        def __init__(self, *args, **config):
            super().__init__(*args, **config)
            agents.append(self)

    outputs = [make_output("", [{"command": command}], cost=0.0) for command in commands]
    names = runpy.run_path(str(EXAMPLE))["main"].__globals__
    names["get_model"] = lambda *_: DeterministicModel(outputs=outputs)
    names["DefaultAgent"] = Kept
    reward = names["main"]("scripted", task, url, environment)
    return {"reward": reward, "messages": agents[0].messages, "version": version("mini-swe-agent")}


print(json.dumps(play(**json.loads(sys.argv[1]))))
