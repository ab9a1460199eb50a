"""The overlay layers that snapshots and forks are made of: stored, chained, flattened, collected."""
