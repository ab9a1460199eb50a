"""What a process imports before it serves or connects (decision 140)."""

from __future__ import annotations

import subprocess
import sys

import pytest

USE = """
import sys
import {module}
assert not {{"gradio", "pandas"}} & set(sys.modules), "imported for pages that nobody asked for"
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
    "module", ["errata_client", "errata_server.app", "errata_server.serve.server", "errata_server.probe"]
)
def test_openenvs_web_interface_is_imported_when_it_is_used(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE.format(module=module)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
