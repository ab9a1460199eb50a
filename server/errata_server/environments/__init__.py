"""What is known of an environment (its signatures, recovery class, options), and `EnvHost`, one running instance of it.

Environments themselves are packages of their own (``envs/``, or anybody's), which `discovery` finds. When an instance
is made, for which session, is decided in `sessions`.
"""
