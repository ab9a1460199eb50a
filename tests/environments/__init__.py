"""Environments as others write them: OpenEnv's classes and functions only, not a line of Errata."""
