"""Recipes: one package for each trainer framework; no recipe imports another.

A recipe plays episodes by its trainer's own loop, makes `rollout.Rollout` records of them, and adds the losses of
`channels` to its trainer's; `trl` is the model.
"""
