"""On-policy distillation of a document into a cartridge, with rollouts of a Tokasaurus server.

docs/cartridges.md has the whole way. `errata_trainer.recipes.cartridge.replica` has the server as a rollout engine of
VeRL, in VeRL's environment.
"""

from .documents import past_states, reset_text, tool_manual
from .files import (
    Cartridge,
    cartridge_model,
    cartridge_of,
    load_cartridge,
    read_cartridge,
    remove_cartridge,
    write_cartridge,
)
from .loop import CartridgeTrainer, document_item
from .server import Completion, TokasaurusClient

__all__ = [
    "Cartridge",
    "CartridgeTrainer",
    "Completion",
    "TokasaurusClient",
    "cartridge_model",
    "cartridge_of",
    "document_item",
    "load_cartridge",
    "past_states",
    "read_cartridge",
    "remove_cartridge",
    "reset_text",
    "tool_manual",
    "write_cartridge",
]
