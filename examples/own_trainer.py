"""Three channels in a training loop of your own, without TRL.

    python examples/own_trainer.py MODEL FILE.jsonl

FILE has `Rollout` and `DpoPair` records, as `write_records` writes them (docs/rollouts.md). The driver finds the error
sites and the pairs; this program makes the forward passes, the loss and the optimizer steps. A trainer that plays
episodes gives the driver its transcripts and runners as well: errata_trainer/recipes/trl/trainer.py.
"""

import sys
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from errata_trainer import DpoPair, Rollout, read_records
from errata_trainer.channels import compose, distil, dpo, forward, heads, pairs
from errata_trainer.driver import ChannelDriver
from errata_trainer.hints import HintRenderer, TemplateHinter
from errata_trainer.sites import Sites


class RecordedPairs:
    """A source of pairs that asks no teachers: it has the pairs of a file."""

    def __init__(self, recorded):
        self.recorded, self.skipped = pairs.trainable_pairs(recorded)

    def use(self, tokenizer, end_ids, reference, **template):
        pass

    def observe(self, rollouts, runners, transcripts):
        pass

    def sample(self, count, referred):
        return referred(self.recorded[:count])

    def metrics(self):
        return {"pairs": float(len(self.recorded))}


def summed_logprobs(model, states, target_ids, lengths):
    """Return the log-probability of each action, from the states that predict its tokens."""
    head = heads.output_head(model)
    each = distil.action_logprobs(states, torch.tensor(target_ids), head.weight, head.bias, transform=head.transform)
    return dpo.segment_sums(each, torch.tensor(lengths))


def grpo_loss(model, rollouts):
    """Return channel 1, here a plain policy gradient; put your own in its place."""
    rows = [rollout.prompt_ids + rollout.completion_ids for rollout in rollouts]
    # The logits that predict a token stand one position before it.
    positions = [
        [len(rollout.prompt_ids) + place - 1 for place, sampled in enumerate(rollout.mask) if sampled]
        for rollout in rollouts
    ]
    target_ids = [row[position + 1] for row, of_row in zip(rows, positions, strict=True) for position in of_row]
    states = forward.trained_states(model, rows, positions)
    logprobs = summed_logprobs(model, states, target_ids, [len(of_row) for of_row in positions])
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    return -((rewards - rewards.mean()) * logprobs).sum() / len(target_ids)


def sdpo_term(model, rollouts, items):
    """Return channel 2: failing turns, against the same model with a hint before them."""
    sites = [(row, item) for row, of_row in enumerate(items) for item in of_row]
    rows = [rollouts[row].prompt_ids + rollouts[row].completion_ids for row, _ in sites]
    student = forward.trained_states(model, rows, [item.student_positions for _, item in sites])
    teacher = forward.frozen_states(
        model, [item.teacher_ids for _, item in sites], [item.teacher_positions for _, item in sites]
    )
    head = heads.output_head(model)
    weights = torch.tensor([item.weight for _, item in sites for _ in item.target_ids])
    divergence, metrics = distil.distil(
        student, teacher, head.weight, head.bias, transform=head.transform, token_weights=weights
    )
    return compose.Term(divergence, metrics.tokens)


def referred(model, asked):
    """Return new pairs with the log-probabilities of the reference: the policy as it is now."""
    batch = pairs.pair_rows(asked)
    states = forward.frozen_states(model, batch.rows, batch.positions)
    chosen, rejected = summed_logprobs(model, states, batch.target_ids, batch.lengths).detach().chunk(2)
    return [
        replace(pair, ref_chosen=float(own), ref_rejected=float(other))
        for pair, own, other in zip(asked, chosen, rejected, strict=True)
    ]


def dpo_term(model, asked):
    """Return channel 3: at replayed states, what teachers agreed on against what the student did."""
    batch = pairs.pair_rows(asked)
    states = forward.trained_states(model, batch.rows, batch.positions)
    chosen, rejected = summed_logprobs(model, states, batch.target_ids, batch.lengths).chunk(2)
    reference = torch.tensor([(pair.ref_chosen, pair.ref_rejected) for pair in asked])
    losses = dpo.dpo_losses(chosen, rejected, reference[:, 0], reference[:, 1])
    weights = torch.tensor([pair.weight for pair in asked])
    return compose.Term((losses * weights).sum(), torch.tensor(len(asked)))


def main(name, path, steps=10):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    forward.refuse_dropout(model)  # channel 2 would distil its noise
    rollouts = [one for one in read_records(path, Rollout) if one.reward is not None and one.lost is None]
    driver = ChannelDriver(
        sites=Sites(TemplateHinter(), HintRenderer(tokenizer)),
        pairs=RecordedPairs(read_records(path, DpoPair)),
    )
    # These episodes are over, so there is no runner to fork: the counterfactual check is off, and samples nothing.
    items = driver.items(rollouts, [None] * len(rollouts), sample=lambda contexts: [])
    by_row = driver.pairs(64, rollouts, lambda asked: referred(model, asked) if asked else [])
    asked = [pair for of_row in by_row for pair in of_row]
    found = sum(len(of_row) for of_row in items)
    if not (found and asked):
        sys.exit(f"{path}: {found} error sites in {len(rollouts)} rollouts, {len(asked)} pairs: both are needed")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        loss, parts = compose.compose(
            grpo_loss(model, rollouts), sdpo=sdpo_term(model, rollouts, items), dpo=dpo_term(model, asked)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, {part: round(float(value), 5) for part, value in parts.items()})


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*given) if len(given) == 2 else sys.exit(print(__doc__) if "--help" in given else __doc__)
