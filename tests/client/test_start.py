"""What a process imports before it serves or connects (decision 140)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hangs import HANGS_S

IMPORT = """
import sys
import {module}
import openenv.core.env_server
assert not {{"gradio", "pandas"}} & set(sys.modules), "imported for pages that nobody asked for"
"""

USE = """
import openenv.core
import openenv.core.env_server as package
from openenv.core import WebInterfaceManager, create_web_interface_app
assert package.create_web_interface_app is create_web_interface_app is openenv.core.create_web_interface_app
from openenv.core.env_server import web_interface
assert web_interface.WebInterfaceManager is WebInterfaceManager
assert web_interface.create_web_interface_app is create_web_interface_app
assert "gradio" in sys.modules
"""


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("errata_client", USE),
        ("errata_server.app", USE),
        ("errata_server.serve.server", ""),  # what was put in place is the same, and imports take seconds
        ("errata_server.probe", ""),
    ],
    ids=lambda value: None if "\n" in value else value,
)
def test_openenvs_web_interface_is_imported_when_it_is_used(module: str, use: str) -> None:
    program = IMPORT.format(module=module) + use
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
