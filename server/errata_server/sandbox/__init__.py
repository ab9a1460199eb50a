"""Where commands of an agent run: the seam (`base`), the backends behind it, and what these are made of.

A backend is one package here (`namespace`, `fake`) or anywhere else. Nothing is imported in this file: helper processes
without the server's dependencies import modules below it.
"""
