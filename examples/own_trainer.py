"""Trains with the three channels in a plain PyTorch loop, without TRL.

    python examples/own_trainer.py MODEL FILE.jsonl

FILE has `Rollout` and `DpoPair` records, as `write_records` writes them (docs/rollouts.md). The driver finds the error
sites and the pairs. This program makes the forward passes, the loss and the optimizer steps. A trainer that plays
episodes itself also passes its transcripts and runners to the driver: see errata_trainer/recipes/trl/trainer.py.
"""

import sys
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from errata_trainer import DpoPair, Rollout, read_records
from errata_trainer.assembly.channel_set import driver_for
from errata_trainer.assembly.pair_source import RecordedPairs
from errata_trainer.channels import compose, distil, dpo, forward, heads, pairs


def summed_logprobs(model, states, target_ids, lengths):
    """Return the log-probability of each action.

    Args:
        model: The policy.
        states: Hidden states at the positions that predict the actions' tokens, of all actions one after the other.
        target_ids: These tokens.
        lengths: How many tokens each action has.
    """
    head = heads.output_head(model)
    token_logprobs = distil.action_logprobs(
        states, torch.tensor(target_ids), head.weight, head.bias, transform=head.transform
    )
    return dpo.segment_sums(token_logprobs, torch.tensor(lengths))


def grpo_loss(model, rollouts):
    """Return channel 1, here a plain policy gradient; put your own loss in its place."""
    rows, positions, target_ids, lengths = [], [], [], []
    for rollout in rollouts:
        row = rollout.prompt_ids + rollout.completion_ids
        sampled = [len(rollout.prompt_ids) + place for place, is_sampled in enumerate(rollout.mask) if is_sampled]
        rows.append(row)
        positions.append([place - 1 for place in sampled])  # the state before a token predicts it
        target_ids += [row[place] for place in sampled]
        lengths.append(len(sampled))
    states = forward.trained_states(model, rows, positions)
    logprobs = summed_logprobs(model, states, target_ids, lengths)
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    return -((rewards - rewards.mean()) * logprobs).sum() / len(target_ids)


def sdpo_term(model, rollouts, items):
    """Return channel 2: distil failing turns from the same model with a hint in its context."""
    rows, sites = [], []
    for rollout, of_rollout in zip(rollouts, items, strict=True):
        for site in of_rollout:
            rows.append(rollout.prompt_ids + rollout.completion_ids)
            sites.append(site)
    student = forward.trained_states(model, rows, [site.student_positions for site in sites])
    teacher = forward.frozen_states(
        model, [site.teacher_ids for site in sites], [site.teacher_positions for site in sites]
    )
    head = heads.output_head(model)
    weights = torch.tensor([site.weight for site in sites for _ in site.target_ids])  # one for each token
    divergence, metrics = distil.distil(
        student, teacher, head.weight, head.bias, transform=head.transform, token_weights=weights
    )
    return compose.Term(divergence, metrics.tokens)


def with_reference(model, new_pairs):
    """Return pairs with the log-probabilities of the reference model, here the policy as it is now."""
    batch = pairs.pair_rows(new_pairs)
    states = forward.frozen_states(model, batch.rows, batch.positions)
    chosen, rejected = summed_logprobs(model, states, batch.target_ids, batch.lengths).detach().chunk(2)
    return [
        replace(pair, ref_chosen=float(own), ref_rejected=float(other))
        for pair, own, other in zip(new_pairs, chosen, rejected, strict=True)
    ]


def dpo_term(model, batch_of_pairs):
    """Return channel 3: DPO at replayed states, of the action that teachers agreed on over the student's."""
    batch = pairs.pair_rows(batch_of_pairs)
    states = forward.trained_states(model, batch.rows, batch.positions)
    chosen, rejected = summed_logprobs(model, states, batch.target_ids, batch.lengths).chunk(2)
    reference = torch.tensor([(pair.ref_chosen, pair.ref_rejected) for pair in batch_of_pairs])
    losses = dpo.dpo_losses(chosen, rejected, reference[:, 0], reference[:, 1])
    weights = torch.tensor([pair.weight for pair in batch_of_pairs])
    return compose.Term((losses * weights).sum(), torch.tensor(len(batch_of_pairs)))


def main(name, path, steps=10):
    """Train the model ``name`` on the records in ``path``."""
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    forward.refuse_dropout(model)  # channel 2 would distil the noise of dropout
    rollouts = [
        rollout for rollout in read_records(path, Rollout) if rollout.reward is not None and rollout.lost is None
    ]
    driver = driver_for(tokenizer=tokenizer, pairs=RecordedPairs(read_records(path, DpoPair)))
    # Recorded episodes have no runner that could be forked, so the counterfactual check is off and samples nothing.
    items = driver.items(rollouts, [None] * len(rollouts), sample=lambda contexts: [])
    pairs_by_rollout = driver.pairs(64, rollouts, lambda new: with_reference(model, new) if new else [])
    all_pairs = [pair for of_rollout in pairs_by_rollout for pair in of_rollout]
    sites = sum(len(of_rollout) for of_rollout in items)
    if not (sites and all_pairs):
        sys.exit(f"{path}: {sites} error sites in {len(rollouts)} rollouts, {len(all_pairs)} pairs: both are needed")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        loss, parts = compose.compose(
            grpo_loss(model, rollouts),
            sdpo=sdpo_term(model, rollouts, items),
            dpo=dpo_term(model, all_pairs),
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, {part: round(float(value), 5) for part, value in parts.items()})


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--help" in arguments:
        print(__doc__)
        sys.exit()
    if len(arguments) != 2:
        sys.exit(__doc__)
    main(*arguments)
