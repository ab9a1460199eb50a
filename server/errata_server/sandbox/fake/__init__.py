"""A sandbox backend without isolation, for tests and simulation: files in memory and a small shell in Python.

It never starts a process or touches the disk.
"""
