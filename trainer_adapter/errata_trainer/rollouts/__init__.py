"""Rollouts: episodes as the trainer recorded them, matched with what the environment delivered, without tensors."""
