"""The second program: a process that puts commands into namespaces, as root or as the server's user (rootless).

It starts with ``python -I -S`` and has this folder alone on ``sys.path``, so its modules import each other by bare name
and nothing else of ours. The server starts its programs by path; it imports `kernel` alone.
"""

from pathlib import Path

PROGRAMS = Path(__file__).parent
"""The folder of ``launcher.py`` and ``fake_root.py``."""
