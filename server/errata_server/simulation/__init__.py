"""Fakes of the server's seams: it runs without a thread, a file, a socket or a real wait, the same for one seed."""

from .clock import SimulatedClock
from .disk import DiskFaults, SimulatedDisk
from .ids import SeededIds
from .loop import Crashed, SimulatedLoop, SimulationError, run, simulated
from .machine import SimulatedMachine
from .threads import SimulatedThreads
from .transport import SimulatedSocket
from .writer import LoopWriter

__all__ = [
    "Crashed",
    "DiskFaults",
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
