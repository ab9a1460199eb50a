"""Properties of environment classes (signatures, recovery class, options), and `EnvHost`, which runs one instance.

Environments are separate packages (``envs/`` or third-party), which `discovery` finds. `sessions` decides when an
instance is created and for which session.
"""
