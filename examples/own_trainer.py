"""Three channels in a loop of one's own, from a file of Rollout and DpoPair records: own_trainer.py MODEL FILE.jsonl"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from errata_trainer import DpoPair, Rollout, read_records
from errata_trainer.channels.compose import Term, compose
from errata_trainer.channels.distil import action_logprobs, distil
from errata_trainer.channels.dpo import dpo_losses, segment_sums
from errata_trainer.channels.forward import frozen_states, trained_states
from errata_trainer.channels.heads import output_head
from errata_trainer.channels.pairs import pair_rows, trainable_pairs
from errata_trainer.channels.splicing import splice
from errata_trainer.hints import FailedTurn, HintRenderer, TemplateHinter


def sites_of(rollouts, hinter, render):
    for row, rollout in enumerate(rollouts):
        for turn in (turn for turn in rollout.turns if turn.failed):
            if hint := hinter.hint(FailedTurn(rollout, turn, turn.failed)):
                ids = render.hint_ids(hint.text, after="tool" if turn.start else "user")
                yield row, splice(rollout, turn, ids, header_ids=render.header_ids)


def logprobs(model, states, ids, lengths):
    each = action_logprobs(states, torch.tensor(ids), output_head(model).weight)
    return segment_sums(each, torch.tensor(lengths))


def main(name, path, steps=10):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    rollouts = [one for one in read_records(path, Rollout) if one.reward is not None and one.lost is None]
    owners, sites = zip(*sites_of(rollouts, TemplateHinter(), HintRenderer(tokenizer)), strict=True)
    pairs = pair_rows(trainable_pairs(read_records(path, DpoPair))[0])
    rows = [one.prompt_ids + one.completion_ids for one in rollouts]
    said = [[len(r.prompt_ids) + n - 1 for n, own in enumerate(r.mask) if own] for r in rollouts]
    ids = [row[position + 1] for row, own in zip(rows, said, strict=True) for position in own]
    rewards = torch.tensor([one.reward for one in rollouts])
    reference = logprobs(model, frozen_states(model, pairs.rows, pairs.positions), pairs.target_ids, pairs.lengths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        own = logprobs(model, trained_states(model, rows, said), ids, [len(one) for one in said])
        grpo = -((rewards - rewards.mean()) * own).sum() / len(ids)  # or whatever your channel 1 is
        student = trained_states(model, [rows[row] for row in owners], [site.student_positions for site in sites])
        teacher = frozen_states(model, [s.teacher_ids for s in sites], [s.teacher_positions for s in sites])
        kl, told = distil(student, teacher, output_head(model).weight)
        actions = logprobs(model, trained_states(model, pairs.rows, pairs.positions), pairs.target_ids, pairs.lengths)
        dpo = dpo_losses(*actions.chunk(2), *reference.chunk(2))
        loss, parts = compose(grpo, sdpo=Term(kl, told.tokens), dpo=Term(dpo.sum(), torch.tensor(float(len(dpo)))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, {part: round(float(value), 5) for part, value in parts.items()})


if __name__ == "__main__":
    main(*sys.argv[1:3])
