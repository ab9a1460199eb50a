"""Tests that need Monarch, which VeRL's environment has, too: ``make test-monarch``."""
