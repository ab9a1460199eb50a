"""Distils a document into a cartridge, on what the student itself says with it.

    python examples/cartridge_distill.py                              # a server of the same contract on a CPU
    python examples/cartridge_distill.py URL MODEL DIRECTORY FILE     # Tokasaurus, its model and cartridges, a document

The divergence from the model that reads the whole document falls, and a prompt is as short as before.
"""

import sys
import tempfile
from pathlib import Path

import torch
from tokasaurus_contract import Tokasaurus
from transformers import AutoModelForCausalLM, AutoTokenizer

from errata_trainer.recipes.cartridge import CartridgeTrainer, TokasaurusClient, cartridge_model
from errata_trainer.tiny import tiny_model, tiny_tokenizer

DOCUMENT = "To read a file, call read with its path. To search, call grep with a word. The password is never in a log. "
QUESTIONS = ("How do I read a file?", "How do I search?", "Where is the password?", "What is never in a log?")


def distil(base, tokenizer, client, directory, document, *, tokens, steps, rate):
    """Print the divergence, and return it before and after the steps."""
    document_ids = tokenizer.encode(document)
    model = cartridge_model(base, document_ids, tokens=tokens)
    trainer = CartridgeTrainer(model, client, directory, document_ids, learning_rate=rate, ignore_eos=True)
    prompts = [tokenizer.encode(question) for question in QUESTIONS]
    kept = trainer.rollouts(prompts, max_tokens=12, count=2)
    before = trainer.divergence_of(kept)
    print(f"document {len(document_ids)} tokens, cartridge {tokens}; before: {before:.4f} nats a token")
    for step in range(steps):
        metrics = trainer.step(prompts, max_tokens=12, count=2)
        if step % 10 == 9:
            print(
                f"step {step + 1}: {metrics['cartridge/kl']:.4f} on new rollouts, "
                f"server and trainer {metrics['cartridge/apart']:.1e} apart"
            )
    after = trainer.divergence_of(kept)
    print(f"after: {after:.4f} nats a token")
    return before, after


def main(arguments, steps=60):
    """Distil a document that is named, or a small one."""
    if arguments:
        url, name, directory, file = arguments
        base, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
        document = Path(file).read_text()
        with TokasaurusClient(url) as client:
            return distil(base, tokenizer, client, Path(directory), document, tokens=512, steps=steps, rate=0.02)
    torch.set_num_threads(1)  # the server shares this process
    tokenizer = tiny_tokenizer([DOCUMENT, *QUESTIONS], vocab_size=400)
    base = tiny_model(tokenizer)
    with torch.no_grad():
        for weight in base.parameters():
            weight.mul_(3.0 if weight.dim() == 2 else 1.0)  # so that what is said before an answer matters
    with tempfile.TemporaryDirectory() as directory, Tokasaurus(base, Path(directory)) as server:
        base = tiny_copy(base)
        with TokasaurusClient(server.url) as client:
            return distil(base, tokenizer, client, Path(directory), DOCUMENT, tokens=16, steps=steps, rate=0.05)


def tiny_copy(model):
    """Return the model again: that of the server stays as it is."""
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    return other


if __name__ == "__main__":
    if "--help" in sys.argv or len(sys.argv) not in (1, 5):
        sys.exit(__doc__)
    main(sys.argv[1:])
