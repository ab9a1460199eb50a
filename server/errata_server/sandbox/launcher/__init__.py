"""Two programs outside the server process: `launcher` runs commands in namespaces, as root or as the server's user
(rootless); `fake_root` runs a package installer without root.

They run under ``python -I -S`` with this folder alone on ``sys.path``, so the modules import each other by bare name
and can import nothing else of this project. The server starts the programs by path, and imports `kernel` and `messages`
only. `make check` runs mypy on this folder a second time, under the names that the modules have in the program.
"""

from pathlib import Path

PROGRAMS = Path(__file__).parent
"""The folder of ``launcher.py`` and ``fake_root.py``."""
