"""The subcommands of ``errata swe``: `cli` chooses one, each has a module."""
