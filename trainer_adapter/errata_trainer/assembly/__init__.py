"""The channels on a trainer's batch, independent of the trainer: sites, pairs, and the losses on its tensors."""
