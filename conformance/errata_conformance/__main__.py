"""``python -m errata_conformance URL``."""

import sys

from .cli import main

sys.exit(main())
