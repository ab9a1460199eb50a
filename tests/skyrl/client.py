"""What the recipe does on SkyRL's server, as JSON: ``python client.py MODEL URL``, in SkyRL's environment.

All rows have at most 32 tokens: SkyRL compiles its model again for longer ones.
"""

import json
import sys
import warnings

import tinker
import torch
from transformers import AutoModelForCausalLM

from errata_protocol.errors import ServiceError
from errata_trainer.recipes.tinker import Reprompt, SdpoSession, TinkerPolicy, datums

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def render(messages):
    """Return a token for each word, 3 before a message and 4 before an answer."""
    ids = []
    for message in messages:
        ids += [3, *(10 + int(word) for word in message["content"].split())]
    return [*ids, 4]


def logprobs(model, ids):
    """Return the log-probability of each token of a row but the first."""
    with torch.no_grad():
        found = model(torch.tensor([list(ids)])).logits[0, :-1].float().log_softmax(-1)
    return found.gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()


def apart(found, expected):
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def main(path, url):
    """Print what was found."""
    model = AutoModelForCausalLM.from_pretrained(path).float().eval()
    policy = TinkerPolicy.connect(url, path, rank=8, deadline_s=400.0)
    found = {"sdk": tinker.__version__, "capabilities": [policy.capabilities().top_k, policy.capabilities().lists]}
    session = SdpoSession(
        policy,
        render,
        reprompt=Reprompt("{prompt}{solution}{feedback}", feedback_template=" {feedback_raw}"),
        form="auto",
    )
    task = [{"role": "user", "content": "5 6 7"}]
    answers = session.sample(task, max_tokens=6, count=2, seed=1)
    row = answers[0].prompt_ids + answers[0].ids
    scored = policy.score([row])[0]
    raw = policy.sampling.compute_logprobs(tinker.types.ModelInput.from_ints(list(row))).result()
    found |= {
        "entries": len(raw) - len(row),
        "score to sampling": apart(scored[-6:], answers[0].logprobs),
        "score to transformers": apart(scored[1:], logprobs(model, row)),
    }
    for answer in answers:
        session.record_denial(answer, "30 31")
    items = [[denial.item] for denial in session.denials]
    rollouts = [denial.rollout for denial in session.denials]
    teacher = policy.teacher_logprobs(rollouts, items)
    item = items[0][0]
    expected = logprobs(model, item.teacher_ids)
    found["teacher to transformers"] = apart(teacher[0][0], [expected[place] for place in item.teacher_positions])
    data = datums(rollouts, advantages=[1.0, -0.5])
    outputs = policy.training.forward(data, "importance_sampling").result().loss_fn_outputs
    found["loss"] = sum(float(one["elementwise_loss"].to_torch().sum()) for one in outputs)
    metrics = session.train_sdpo(learning_rate=5e-3, refresh=False)
    found |= {"form": session.form, "kl": metrics["sdpo/kl"], "tokens": metrics["sdpo/tokens"]}
    session.refresh()
    [again] = policy.score([row])
    gaps = [t - s for t, s in zip(teacher[0][0], answers[0].logprobs, strict=True)]
    changes = [a - s for a, s in zip(again[-6:], answers[0].logprobs, strict=True)]
    found["agreement"] = sum(gap * change for gap, change in zip(gaps, changes, strict=True))
    try:
        policy.teacher_logprobs(rollouts, items)
        found["guard"] = None
    except ServiceError as error:
        found["guard"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
