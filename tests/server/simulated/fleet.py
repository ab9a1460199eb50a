"""Run schedules of a fleet by the thousand, or show one; `make simulate-fleet SEEDS=0..9999`."""

from __future__ import annotations

import sys

from .__main__ import main
from .fleet_world import FleetWorld

if __name__ == "__main__":
    sys.exit(main(FleetWorld, "python -m tests.server.simulated.fleet"))
