"""What is known of an environment (its signatures, recovery class, options), and `EnvHost`, one running instance of it.

Installed environments are found here too. When an instance is made, for which session, is decided in `sessions`.
"""
