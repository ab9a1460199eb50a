"""``python -m errata_server.cli``."""

from . import main

main()
