"""Supervised warm-up of a tiny policy on scripted episodes that were played on the server.

A policy with random weights calls no tool, so there would be nothing to see. After this it makes the script's turns,
good and bad, and follows hints: after a hint, the better turn was trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import get_json_schema

from errata_client import ErrataClient
from errata_protocol.errors import ServiceError

from ..assembly.sites import Sites
from ..episodes.playing import EpisodeRunner, Session
from ..episodes.tools import PlayedEnvironment, published
from ..hints import HintRenderer, TemplateHinter
from ..recipes.trl import environment_factory
from ..rollouts.rollout import Rollout
from ..rollouts.transcript import build_rollout
from ..tiny import END, tiny_model, tiny_tokenizer
from . import script

BATCH, RATE = 3, 1e-2
"""Few samples a step and a high rate: of seven settings tried, the one that learned the script best for its tokens."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A sequence to train on.

    Attributes:
        ids: Tokens of the sequence.
        learned: Whether each token is the policy's own, and so is trained on.
    """

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A scripted episode: its messages, and its runner."""

    messages: list[dict[str, Any]]
    runner: EpisodeRunner


def taught_policy(url: str, *, steps: int = 150, seed: int = 0, say: Callable[[str], None]) -> tuple[Any, Any]:
    """Return a tokenizer and a policy that can play `script.TASK`, well or badly.

    Args:
        url: URL of a server of the terminal environment, on which the script is played.
        steps: Number of supervised steps.
        seed: Seed of weights and order.
        say: Takes a line of progress.
    """
    environment = published("terminal")
    tools_class = environment_factory(url, environment, tools=script.TOOLS)
    tools = [get_json_schema(getattr(tools_class, name)) for name in script.TOOLS]
    conversations = []
    for turns in script.EPISODES:
        session = ErrataClient[Any, Any, Any](url).sync()
        session.connect()
        conversations.append(play(session, environment, turns))
    texts = [str(message["content"]) for one in conversations for message in one.messages]
    tokenizer = tiny_tokenizer([*texts, *(script.turn_text(turn) for turns in script.EPISODES for turn in turns)])
    model = tiny_model(tokenizer, seed=seed)
    samples = shown(tokenizer, conversations, tools)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"a policy of {parameters:,} parameters learns to speak from {len(samples)} samples")

    def report(step: int, loss: float) -> None:
        say(f"warm-up step {step}: {loss:.3f} nats a token")

    learn(model, samples, steps=steps, pad_id=tokenizer.pad_token_id, seed=seed, report=report)
    return tokenizer, model


def play(session: Session, environment: PlayedEnvironment, turns: Sequence[script.Turn]) -> Conversation:
    """Play an episode, close the session, and return what a student would have read and written."""
    runner = EpisodeRunner(environment, lambda: session)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": script.PROMPT + runner.reset({"task_id": script.TASK})}
    ]
    for name, arguments in turns:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": name, "content": runner.call(name, arguments)})
    messages.append({"role": "assistant", "content": script.LAST_WORDS})
    runner.close()
    if runner.lost is not None:
        raise ServiceError(f"a scripted episode was lost: {runner.lost}")
    return Conversation(messages, runner)


def shown(tokenizer: Any, conversations: Sequence[Conversation], tools: Sequence[Any]) -> list[Shown]:
    """Return the sequences to train on: each episode, and for each failing turn the better one after the hint.

    Args:
        tokenizer: Tokenizer of the policy.
        conversations: Scripted episodes; their sessions may be closed.
        tools: Descriptions of the tools, as the trainer gives them to the chat template.
    """
    rollouts = [_rollout(tokenizer, one, tools) for one in conversations]
    found = [
        Shown(rollout.prompt_ids + rollout.completion_ids, (False,) * len(rollout.prompt_ids) + _booleans(rollout.mask))
        for rollout in rollouts
    ]
    renderer = HintRenderer(tokenizer)
    sites = Sites(TemplateHinter(count=renderer.count), renderer)
    for site in sites.found(rollouts, [one.runner for one in conversations], tools):
        context = site.context_ids
        better = script.turn_text(script.BETTER[site.failed.call.arguments["command"]]) + END
        turn = tuple(tokenizer.encode(better, add_special_tokens=False))
        found.append(Shown(context + turn, (False,) * len(context) + (True,) * len(turn)))
    return found


def learn(
    model: Any, samples: Sequence[Shown], *, steps: int, pad_id: int, seed: int, report: Callable[[int, float], None]
) -> None:
    """Train on samples in small batches.

    Args:
        model: Causal language model to train; it is in evaluation mode afterwards.
        samples: Sequences to train on; each is used as often as any other, give or take one.
        steps: Number of AdamW steps, over which the learning rate rises briefly and then falls to almost 0.
        pad_id: Token to pad with.
        seed: Seed of the samples' order.
        report: Callback for the step and its loss in nats per token, called every 50 steps.
    """
    chance = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    waiting: list[Shown] = []
    model.train()
    for step in range(1, steps + 1):
        if len(waiting) < BATCH:
            waiting += chance.sample(samples, len(samples))
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        ids, labels = _padded(batch, pad_id)
        loss = model(input_ids=ids, attention_mask=(ids != pad_id).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if step % 50 == 0:
            report(step, float(loss.detach()))
    model.eval()


def _rollout(tokenizer: Any, conversation: Conversation, tools: Sequence[Any]) -> Rollout:
    first, rest = conversation.messages[:1], conversation.messages[1:]
    given: dict[str, Any] = {"tokenize": False, "tools": list(tools)}
    prompt = tokenizer.encode(tokenizer.apply_chat_template(first, add_generation_prompt=True, **given))
    whole = tokenizer.encode(tokenizer.apply_chat_template(conversation.messages, **given).rstrip("\n"))
    header = tokenizer.encode("<|im_start|>assistant\n")
    mask, sampled = [], True
    for place in range(len(prompt), len(whole)):
        sampled = sampled or whole[place - len(header) : place] == header
        mask.append(int(sampled))
        sampled = sampled and whole[place] != tokenizer.eos_token_id
    return build_rollout(
        prompt,
        whole[len(prompt) :],
        mask,
        rest,
        conversation.runner.deliveries(),
        eid=conversation.runner.eid,
        environment=conversation.runner.environment.name,
        task=conversation.runner.task,
    )


def _booleans(mask: Sequence[int]) -> tuple[bool, ...]:
    return tuple(map(bool, mask))


def _padded(samples: Sequence[Shown], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels ``[B, T]`` padded on the right; -100 for tokens that are not trained on."""
    length = max(len(one.ids) for one in samples)
    ids = torch.full((len(samples), length), pad_id)
    labels = torch.full((len(samples), length), -100)
    for row, one in enumerate(samples):
        own = torch.tensor(one.ids)
        ids[row, : len(own)] = own
        labels[row, : len(own)] = torch.where(torch.tensor(one.learned), own, -100)
    return ids, labels
