"""What an environment class says about itself, and one hosted instance of it.

Signatures, recovery class, declarations and detectors of an environment; `EnvHost` runs its calls on the right thread.
"""
