"""Prepares instances before they are served: where their code comes from, how it is built, kept and validated."""
