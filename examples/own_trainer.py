"""Three channels in a loop of one's own, from a file of Rollout and DpoPair records: own_trainer.py MODEL FILE.jsonl"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from errata_trainer import DpoPair, Rollout, read_records
from errata_trainer.channels import compose, distil, dpo, forward, heads, pairs, splicing
from errata_trainer.hints import FailedTurn, HintRenderer, TemplateHinter


def sites_of(rollouts, hinter, render):
    for row, turn in [(row, turn) for row, one in enumerate(rollouts) for turn in one.turns if turn.failed]:
        if hint := hinter.hint(FailedTurn(rollouts[row], turn, turn.failed)):
            ids = render.hint_ids(hint.text, after="tool" if turn.start else "user")
            yield row, splicing.splice(rollouts[row], turn, ids, header_ids=render.header_ids)


def logprobs(model, states, ids, lengths):
    head = heads.output_head(model)
    each = distil.action_logprobs(states, torch.tensor(ids), head.weight, head.bias, transform=head.transform)
    return dpo.segment_sums(each, torch.tensor(lengths))


def main(name, path, steps=10):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    rollouts = [one for one in read_records(path, Rollout) if one.reward is not None and one.lost is None]
    found = list(sites_of(rollouts, TemplateHinter(), HintRenderer(tokenizer)))
    kept, _ = pairs.trainable_pairs(read_records(path, DpoPair))
    if not (found and kept):
        sys.exit(f"{path}: {len(found)} error sites in {len(rollouts)} rollouts, {len(kept)} pairs: both are needed")
    (owners, sites), p = zip(*found, strict=True), pairs.pair_rows(kept)
    w, count = torch.tensor([site.weight for site in sites for _ in site.target_ids]), torch.tensor(len(kept))
    rows = [one.prompt_ids + one.completion_ids for one in rollouts]
    said = [[len(r.prompt_ids) + n - 1 for n, own in enumerate(r.mask) if own] for r in rollouts]
    ids = [row[position + 1] for row, own in zip(rows, said, strict=True) for position in own]
    rewards = torch.tensor([one.reward for one in rollouts])
    reference = logprobs(model, forward.frozen_states(model, p.rows, p.positions), p.target_ids, p.lengths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        own = logprobs(model, forward.trained_states(model, rows, said), ids, [len(one) for one in said])
        grpo = -((rewards - rewards.mean()) * own).sum() / len(ids)  # or whatever your channel 1 is
        student = forward.trained_states(model, [rows[row] for row in owners], [s.student_positions for s in sites])
        teacher = forward.frozen_states(model, [s.teacher_ids for s in sites], [s.teacher_positions for s in sites])
        head = heads.output_head(model)
        kl, told = distil.distil(student, teacher, head.weight, head.bias, transform=head.transform, token_weights=w)
        actions = logprobs(model, forward.trained_states(model, p.rows, p.positions), p.target_ids, p.lengths)
        losses = dpo.dpo_losses(*actions.chunk(2), *reference.chunk(2)) * torch.tensor([one.weight for one in kept])
        loss, parts = compose.compose(grpo, sdpo=compose.Term(kl, told.tokens), dpo=compose.Term(losses.sum(), count))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, {part: round(float(value), 5) for part, value in parts.items()})


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*given) if len(given) == 2 else sys.exit(print(__doc__) if "--help" in given else __doc__)
