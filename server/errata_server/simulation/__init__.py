"""Fakes of the server's seams (event loop, clock, ids, threads, disk, sockets), for a deterministic simulation of it.

The server then runs without a thread, a socket or a real wait, and the same way for one seed; without a file too, but
for those of a SQLite index where one is asked for. Nothing of the server imports this package.
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
