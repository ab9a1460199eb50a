"""Fakes of the server's interfaces (event loop, clock, ids, threads, disk, sockets), to simulate it deterministically.

A simulated server runs without threads, sockets, real waiting and files (except those of a SQLite index, if the
simulation has one), and in the same way each time for the same seed. No other package of the server imports this one.
"""

from .clock import SimulatedClock
from .disk import DiskFaults, SimulatedDisk
from .fleet_loop import FleetLoop
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
    "FleetLoop",
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
