"""A whole server and its trainers under one seed: who crashes, what is lost, and whether every promise held.

python -m tests.server.simulated 0..999        # a range of seeds on all cores
python -m tests.server.simulated --trace 17    # what happened under one
"""
