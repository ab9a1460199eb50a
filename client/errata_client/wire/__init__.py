"""Frames of OpenEnv's messages: the bytes that arrive, checked, and the classes of an environment made of them."""
