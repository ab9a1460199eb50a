"""The keys of a task.toml: which are followed, which change nothing here, and which refuse the task.

A key that changes the task and is not followed would give rewards for another task than its author wrote. So each key
of Harbor's format stands in `_KEYS`, and a key that is not there refuses the task; only ``[metadata]``, ``[task]`` and
single values beside the tables, which describe a task, may be anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

VARIABLES_VARIABLE = "ERRATA_TASK_VARIABLES"
"""Names of variables, of the machine's own or with secrets, that ``${NAME}`` in a task.toml may read from the server's
environment, separated by commas."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_TEMPLATE = re.compile(rf"\$\{{([A-Za-z_][A-Za-z0-9_]*)(?::-((?:[^{{}}]|{_BRACES})*))?\}}")
"""A variable, or a variable and its default, in which braces are in pairs."""
_WITHHELD = re.compile(
    r"^(?:(?:ERRATA|SSH|SUDO|KUBE\w*|XDG|AWS|AZURE|GCP|GOOGLE|DOCKER|GIT|PG|MYSQL|VIRTUAL)_.*"
    r"|(?:.*_)?PATH|HOME|USER\w*|LOGNAME|SHELL|TMPDIR|HOSTNAME|MAIL|PAT|KUBECONFIG|PG[A-Z]+)$"
    r"|KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SESSION|PRIVATE|CERT|DSN|URL|URI|_PAT$|PROXY|CONN|WEBHOOK|JWT|BEARER"
    r"|DATABASE|_DB$|MONGO|REDIS|SALT|SEED|SIGN|OTP|HASH",
    re.IGNORECASE,
)


class KeyRefused(ValueError):
    """A key of a task.toml that cannot be followed; the message names it."""


def _any(value: Any) -> bool:
    return True


def _off(value: Any) -> bool:
    return value in ("", 0, False, [], {})


def _is(*allowed: object) -> Callable[[Any], bool]:
    return lambda value: (value.lower() if isinstance(value, str) else value) in allowed


_USER = (_is("root", "agent", "", 0, 64000), "the agent is the only user here, and stands for root")
_NETWORK = (_any, "")
"""There is no network, whatever is allowed: what needs one does not pass the check."""

_KEYS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "": {
        **dict.fromkeys(("version", "schema_version", "source", "task", "metadata"), (_any, "")),
        **dict.fromkeys(("verifier", "agent", "environment", "solution", "errata"), (_any, "")),
        **dict.fromkeys(("artifacts", "multi_step_reward_strategy"), (_any, "")),
        "steps": (_off, "a task of several steps cannot be served: make each step a task of its own"),
    },
    "environment": {
        **dict.fromkeys(("build_timeout_sec", "docker_image", "env"), (_any, "")),
        **dict.fromkeys(("cpus", "memory", "memory_mb", "storage", "storage_mb"), (_any, "")),
        **dict.fromkeys(("allow_internet", "network_mode", "allowed_hosts"), _NETWORK),
        "os": (_is("linux", ""), "sandboxes are Linux"),
        "gpus": (_off, "sandboxes have no GPU"),
        "gpu_types": (_any, ""),  # says nothing without gpus
        "tpu": (_off, "sandboxes have no TPU"),
        "mcp_servers": (_off, "the agent has a shell and no other tools: do without them"),
        "skills_dir": (_off, "the agent gets its instruction only: copy what it needs in the Dockerfile"),
        "healthcheck": (_off, "no process outlives a command here, so there is no service to wait for"),
        "workdir": (_off, "say WORKDIR in environment/Dockerfile instead"),
    },
    "verifier": {
        "timeout_sec": (_any, ""),
        "env": (_any, ""),
        "user": _USER,
        "environment_mode": (_is("shared", ""), "the verifier runs on the agent's final files"),
        "environment": (_off, "the verifier runs on the agent's final files: test.sh and tests/ have to be enough"),
        "collect": (_off, "test.sh has to collect what it needs"),
        "restart_environment": (_any, ""),  # no process of the agent is left in any case
        "import_path": (_off, "a verifier is tests/test.sh or tests/verify.py"),
        **dict.fromkeys(("network_mode", "allowed_hosts"), _NETWORK),
    },
    "agent": {
        "timeout_sec": (_any, ""),
        "user": _USER,
        **dict.fromkeys(("network_mode", "allowed_hosts"), _NETWORK),
    },
    "solution": {"env": (_any, "")},
    "errata": dict.fromkeys(("base", "built", "deterministic", "env", "max_score", "probes", "unchecked"), (_any, "")),
}
"""For each table and key: whether a value can be followed, and what to do where it cannot."""


def check_keys(config: Mapping[str, Any]) -> list[str]:
    """Check the keys of a task.toml.

    Args:
        config: The tables of the file.

    Returns:
        Lines that say which keys are not used, because nobody knows what they mean.

    Raises:
        KeyRefused: A key changes the task and cannot be followed, or its table has no such key.
    """
    unused = []
    for table, known in _KEYS.items():
        values = config.get(table, {}) if table else config
        if not isinstance(values, Mapping):
            raise KeyRefused(f"[{table}] must be a table")
        for key, value in values.items():
            name = f"[{table}] {key[:80]}" if table else key[:80]
            if key in known:
                can_follow, cure = known[key]
                if not can_follow(value):
                    shown = f" = {value!r:.60}" if not isinstance(value, dict | list) else ""
                    raise KeyRefused(f"{name}{shown} cannot be followed: {cure}")
            elif table or isinstance(value, dict | list):
                raise KeyRefused(f"{name} is no key that Errata knows, and it could change the task: take it out")
            else:
                unused.append(f"task.toml: {name} is not used")
    return unused


def variables(config: Mapping[str, Any], table: str) -> dict[str, str]:
    """Return the variables in the table ``env`` of a table, with templates resolved.

    ``${NAME}`` is the value of that variable in the server's environment, and ``${NAME:-default}`` is the default where
    it is not set, with its own templates resolved. A name of the machine's own, or that looks like a secret's, is read
    only if `VARIABLES_VARIABLE` allows it, because the author of a task is not trusted with the operator's secrets.

    Args:
        config: The tables of the file.
        table: The table that has ``env``.

    Raises:
        KeyRefused: It has something else than variables, or a template without a value.
    """
    values = config.get(table, {}).get("env", {})
    if not isinstance(values, dict):
        raise KeyRefused(f"[{table}.env] must be a table")
    found = {}
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name):
            raise KeyRefused(f"[{table}.env] {name[:80]!r} is not the name of a variable")
        if not isinstance(value, str | int | float) or "\0" in str(value):
            raise KeyRefused(f"[{table}.env] {name} must be text or a number, without NUL characters")
        try:
            found[name] = _resolved(str(value))
        except KeyRefused as error:
            raise KeyRefused(f"[{table}.env] {name}: {error}") from None
    return found


def _resolved(text: str) -> str:
    rest = _TEMPLATE.sub("", text)
    if "${" in rest:
        raise KeyRefused(f"{rest[rest.index('${') :][:80]} is neither ${{NAME}} nor ${{NAME:-default}}")
    return _TEMPLATE.sub(_value, text)


def _value(template: re.Match[str]) -> str:
    name, default = template[1], template[2]
    value = os.environ.get(name)
    if value is None:
        if default is None:
            raise KeyRefused(f"{name} is not set in this environment: set it, or give it a default")
        return _resolved(default)
    allowed = {part.strip() for part in os.environ.get(VARIABLES_VARIABLE, "").split(",")}
    if _WITHHELD.search(name) and name not in allowed:
        raise KeyRefused(
            f"{name} belongs to this machine or could be a secret: {VARIABLES_VARIABLE}={name} gives it to tasks"
        )
    return value
