"""Room of the trainer adapter: rollouts, hints, teachers, channels and recipes live here. Empty until they do.

It may import ``errata_protocol`` and ``errata_client`` only; no recipe imports another.
"""
