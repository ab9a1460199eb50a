"""Attempts to be rewarded without a repair, and what becomes of them."""
