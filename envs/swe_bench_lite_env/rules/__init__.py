"""The benchmark's rules as pure functions, text in and verdict out: directives, log parsers, verdict, reports.

They are those of the package swebench 5.0.2 (the default) and 4.1.0; ``make test-oracles`` compares them with both on
the same logs.
"""
