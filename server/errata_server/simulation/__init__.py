"""Fakes of the server's seams: it runs without a thread, a socket or a real wait, the same for one seed.

Without a file too, but for those of a SQLite index, where one is asked for.
"""

from .clock import SimulatedClock
from .disk import DiskFaults, SimulatedDisk
from .ids import SeededIds
from .index_files import IndexFiles
from .loop import Crashed, SimulatedLoop, SimulationError, run, simulated
from .machine import SimulatedMachine
from .threads import SimulatedThreads
from .transport import SimulatedSocket
from .writer import LoopWriter

__all__ = [
    "Crashed",
    "DiskFaults",
    "IndexFiles",
    "LoopWriter",
    "SeededIds",
    "SimulatedClock",
    "SimulatedDisk",
    "SimulatedLoop",
    "SimulatedMachine",
    "SimulatedSocket",
    "SimulatedThreads",
    "SimulationError",
    "run",
    "simulated",
]
