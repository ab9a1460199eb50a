"""A pytest plugin that puts another server in the place of OpenEnv's, for OpenEnv's own tests.

``pytest -p suite_target --suite-target MODULE`` replaces those of `NAMES` that the module has, wherever OpenEnv's
packages export them, before any test imports them. The module is a plugin, too, and may have hooks. Without the option
the tests run on OpenEnv's server.
"""

from __future__ import annotations

import importlib

import pytest

NAMES = ("HTTPEnvServer", "create_app", "create_fastapi_app")
"""What a server implementation has, with OpenEnv's signatures."""
PLACES = ("openenv.core.env_server.http_server", "openenv.core.env_server", "openenv.core")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--suite-target``."""
    parser.addoption("--suite-target", metavar="MODULE", help="server implementation to test, in place of OpenEnv's")


def pytest_configure(config: pytest.Config) -> None:
    """Replace OpenEnv's names.

    Raises:
        pytest.UsageError: The module has none of them.
    """
    target = config.getoption("--suite-target")
    if target is None:
        return
    module = importlib.import_module(target)
    config.pluginmanager.register(module)
    replacements = {name: getattr(module, name) for name in NAMES if hasattr(module, name)}
    if not replacements:
        raise pytest.UsageError(f"--suite-target {target}: the module has none of {', '.join(NAMES)}")
    for place in PLACES:
        exported = vars(importlib.import_module(place))
        exported.update({name: ours for name, ours in replacements.items() if name in exported})


def pytest_report_header(config: pytest.Config) -> str:
    """Return the line that says which server is tested."""
    return f"server under test: {config.getoption('--suite-target') or 'of OpenEnv'}"
