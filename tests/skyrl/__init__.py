"""The Tinker recipe against SkyRL's own server, which trains a LoRA adapter in JAX, with an SDK that it understands."""
