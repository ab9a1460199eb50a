"""A sandbox backend without isolation, for tests and simulation: files in memory and a small shell in Python.

It starts no process and does not use the disk.
"""
