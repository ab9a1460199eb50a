"""``python -m errata_sandboxd``: the broker without anything of the server in its process."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
