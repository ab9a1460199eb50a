"""Tests that need VeRL, which has an environment of its own: ``make test-verl``."""
