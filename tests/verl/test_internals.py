"""Names of VeRL that our recipe uses and VeRL does not document: each is where it is looked for.

A failure after an upgrade names the module of ours to adapt.
"""

from __future__ import annotations

import inspect

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.tokenizer.continuous_token import MergeResult
from verl.workers.rollout.replica import TokenOutput

RECIPE = "errata_trainer.recipes.verl"
AGENT_LOOP = f"{RECIPE}.agent_loop"


@pytest.mark.parametrize(
    ("where", "names", "module"),
    [
        (
            AgentLoopBase,
            "ct_build_initial_tokens ct_merge_assistant_token ct_merge_context_msg _cap_text_prompt_length",
            "agent_loop",
        ),
        (ToolParser, "get_tool_parser extract_tool_calls stop_token_ids", "tool_calls"),
        (MergeResult, "token_ids removed_prefix_token_count", "agent_loop"),
        (TokenOutput, "token_ids log_probs stop_reason extra_fields", "agent_loop"),
        (AgentLoopMetrics, "generate_sequences tool_calls", "agent_loop"),
        (
            AgentLoopOutput,
            "prompt_ids response_ids response_mask response_logprobs reward_score num_turns metrics extra_fields",
            "agent_loop",
        ),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_an_internal_is_where_it_was(where: type, names: str, module: str) -> None:
    known = {*dir(where), *getattr(where, "__annotations__", {})}
    for name in names.split():
        assert name in known, f"{where.__name__} has no {name}: {RECIPE}.{module} needs it"


def test_an_agent_loop_has_the_attributes_that_ours_reads() -> None:
    made = inspect.getsource(AgentLoopBase.__init__)
    for name in ("config", "rollout_config", "server_manager", "tokenizer", "loop"):
        assert f"self.{name} = " in made, f"AgentLoopBase sets no {name}: {AGENT_LOOP} reads it"


def test_the_prompts_own_cap_is_called_by_the_method_that_builds_it() -> None:
    """Ours takes its place; under another name a prompt that is too long would be cut again."""
    assert "self._cap_text_prompt_length(" in inspect.getsource(AgentLoopBase.ct_build_initial_tokens)
