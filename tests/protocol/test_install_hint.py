"""How an extra is installed, by where the distribution came from."""

from __future__ import annotations

import json
import shlex

import pytest
from packaging.requirements import Requirement

from errata_protocol.install_hint import install_hint


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'openenv-errata[trl]'"),
        ("", "pip install 'openenv-errata[trl]'"),
        ("no json", "pip install 'openenv-errata[trl]'"),
        ({"url": "file:///src/errata", "dir_info": {"editable": True}}, "pip install -e '/src/errata[trl]'"),
        ({"url": "file:///a%20b/errata", "dir_info": {}}, "pip install '/a b/errata[trl]'"),
        (
            {"url": "file:///dist/e-0.1-py3-none-any.whl", "archive_info": {}},
            "pip install 'openenv-errata[trl] @ file:///dist/e-0.1-py3-none-any.whl'",
        ),
        (
            {"url": "https://git.example/errata", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'openenv-errata[trl] @ git+https://git.example/errata@abc'",
        ),
        (
            {
                "url": "https://git.example/errata",
                "vcs_info": {"vcs": "git", "commit_id": "abc"},
                "subdirectory": "one",
            },
            "pip install 'openenv-errata[trl] @ git+https://git.example/errata@abc#subdirectory=one'",
        ),
    ],
)
def test_the_command_installs_from_where_the_distribution_came(origin: object, command: str) -> None:
    assert install_hint("trl", json.dumps(origin) if isinstance(origin, dict) else origin) == command  # type: ignore[arg-type]
    wanted = shlex.split(command)[-1]
    if wanted.startswith("openenv-errata"):
        assert Requirement(wanted).extras == {"trl"}


def test_an_extra_of_another_distribution_is_named_with_it() -> None:
    assert install_hint("ablation", None, "openenv-errata-bench") == "pip install 'openenv-errata-bench[ablation]'"
