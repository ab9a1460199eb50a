"""The Tinker cookbook's own rollouts and training step with served environments, in an environment of its own."""
