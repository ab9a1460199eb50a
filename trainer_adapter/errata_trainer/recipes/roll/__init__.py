"""Episodes of a served environment for ROLL, and an environment manager that trains on whole trajectories.

docs/roll.md has the whole way. ROLL is on no package index: `errata_trainer.recipes.roll.manager` is imported in ROLL's
own environment, `errata_trainer.recipes.roll.env` wherever ``gem`` is.
"""
