"""SDPO on a Tinker service: a student learns from feedback on its answers.

    python examples/tinker_sdpo.py              # a local service around a tiny random model; a CPU, half a minute
    python examples/tinker_sdpo.py URL MODEL    # a service and a model of yours, with TINKER_API_KEY

Of a random model nothing sensible can be asked. What can be seen is that the divergence between the student with the
feedback and without it falls.
"""

import os
import sys

import torch
from tinker_service import TinkerService
from transformers import AutoTokenizer

from errata_trainer.recipes.tinker import SdpoSession, TinkerPolicy
from errata_trainer.tiny import tiny_model, tiny_tokenizer

TASK = [{"role": "user", "content": "What is the code?"}]
FEEDBACK = "It is blue."


def divergence(policy, session):
    """Return KL(student || teacher with the feedback), estimated from answers of the student, in nats a token."""
    answers = session.sample(TASK, max_tokens=12, count=16, seed=7)
    prompt = session.render(session.reprompt.messages(TASK, feedback=FEEDBACK))
    scores = policy.score([(*prompt, *answer.ids) for answer in answers], sampler=policy.teacher)
    gaps = [
        own - other
        for answer, of_teacher in zip(answers, scores, strict=True)
        for own, other in zip(answer.logprobs, of_teacher[-len(answer.ids) :], strict=True)
    ]
    return sum(gaps) / len(gaps)


def train(policy, tokenizer, steps, form="auto"):
    """Print the divergence, and return it before and after the steps."""

    def render(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    session = SdpoSession(policy, render, stop=[tokenizer.eos_token_id], form=form)
    before = divergence(policy, session)
    print(f"before: {before:.3f} nats a token")
    for step in range(steps):
        for answer in session.sample(TASK, max_tokens=12, count=8, seed=100 * step):
            session.record_denial(answer, FEEDBACK)
        metrics = session.train_sdpo(learning_rate=3e-3)
        print(f"step {step}: {metrics['sdpo/kl']:.3f} of the form that is trained")
    after = divergence(policy, session)
    print(f"after {steps} steps ({session.form}): {after:.3f} nats a token")
    return before, after


def main(arguments, steps=10):
    """Train on a service that is named, or on a local one."""
    if arguments:
        url, model = arguments
        with TinkerPolicy.connect(url, model, teacher_every=10_000) as policy:
            return train(policy, AutoTokenizer.from_pretrained(model), steps)
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    torch.set_num_threads(1)  # the service and the SDK share this process
    tokenizer = tiny_tokenizer(["What is the code? It is blue.", "Correctly solve the original question."])
    model = tiny_model(tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.dim() == 2 else 1.0)  # so that what is said before an answer matters
    with (
        TinkerService(model) as service,
        TinkerPolicy.connect(service.url, "tiny", api_key="tml-local", teacher_every=10_000) as policy,
    ):
        return train(policy, tokenizer, steps)


if __name__ == "__main__":
    if "--help" in sys.argv or len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    main(sys.argv[1:])
