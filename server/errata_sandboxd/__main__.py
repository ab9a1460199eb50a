"""``python -m errata_sandboxd``: the broker in a process that imports nothing of the server."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
