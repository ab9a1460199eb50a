"""One trainer each; no recipe imports another."""
