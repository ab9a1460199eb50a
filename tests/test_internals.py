"""Undocumented names of other packages that our code needs: all are listed, and each is where it is looked for.

A failure after an upgrade names the module of ours to adapt. `make test-lowest` runs this with the oldest versions, and
`make test-latest` with the latest.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import platform
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OURS = (
    "errata_protocol",
    "errata_os",
    "errata_client",
    "errata_server",
    "errata_environment",
    "terminal_env",
    "swe_bench_lite_env",
    "errata_redteam",
    "errata_bench",
    "errata_trainer",
    "errata_ablation",
)
SOURCES = ("protocol", "client", "server", "envs", "bench/errata_bench", "bench/errata_ablation", "trainer_adapter")


@dataclass(frozen=True)
class Internals:
    """Undocumented names of one class or module.

    Args:
        where: ``module:Class`` or ``module``.
        names: Its members. Of a class these may be attributes that its methods assign.
        user: Our module that needs them.
        purpose: What for.
        held_as: Attribute of uvicorn's protocols that holds such an object.
    """

    where: str
    names: str
    user: str
    purpose: str
    held_as: str = ""


HTTP = "errata_server.serve.uvicorn_protocols.BoundedHttp"
SOCKET = "errata_server.serve.uvicorn_protocols.BoundedSocket"
H11 = "uvicorn.protocols.http.h11_impl"
SANSIO = "uvicorn.protocols.websockets.websockets_sansio_impl"
WEB = "openenv.core.env_server.web_interface"
TRL = "trl.trainer.grpo_trainer:GRPOTrainer"
PARALLEL = "errata_trainer.recipes.trl.parallel_tools"

INTERNALS = (
    # uvicorn: no part of its protocol classes is documented, private or not
    Internals(f"{H11}:H11Protocol", "config transport loop", HTTP, "reads what it was made with"),
    Internals(
        f"{H11}:H11Protocol",
        "connection_made connection_lost data_received handle_websocket_upgrade on_response_complete",
        HTTP,
        "counts connections and times their requests; under other names ours would not be called",
    ),
    Internals(f"{H11}:H11Protocol", "cycle", HTTP, "knows whether a request runs"),
    Internals(f"{H11}:RequestResponseCycle", "response_complete", HTTP, "knows whether a request runs", "cycle"),
    Internals(
        f"{SANSIO}:WebSocketsSansIOProtocol",
        "connection_made connection_lost data_received handle_connect run_asgi send receive pause_writing "
        "resume_writing",
        SOCKET,
        "reads, bounds and counts messages; under other names ours would not be called",
    ),
    Internals(
        f"{SANSIO}:WebSocketsSansIOProtocol",
        "app scope config transport loop queue writable read_paused",
        SOCKET,
        "replaces the queue and the event by smaller ones, and stops reading for backpressure",
    ),
    Internals(
        f"{SANSIO}:WebSocketsSansIOProtocol",
        "handshake_complete close_sent handle_parser_exception",
        SOCKET,
        "closes the socket of a message over its bound, and ends a refused handshake",
    ),
    Internals(f"{SANSIO}:WebSocketsSansIOProtocol", "conn request response", SOCKET, "lets go of parser and headers"),
    Internals(
        "uvicorn.server:Server", "capture_signals handle_exit", "errata_server.serve.server", "ends with status 0"
    ),
    Internals(
        f"{SANSIO}:WebSocketsSansIOProtocol",
        "disconnected handle_close keepalive_timeout shutdown",
        SOCKET,
        "cuts a socket whose peer takes nothing",
    ),
    Internals(
        "uvicorn.server:Server", "startup shutdown servers", "errata_server.serve.server", "announces itself and drains"
    ),
    Internals(
        "uvicorn.server:Server",
        "config should_exit",
        "errata_server.serve.server",
        "says what a signal does, once, and how many connections are closed",
    ),
    Internals("uvicorn.server:Server", "on_tick", "errata_server.serve.server", "counts the sessions of a drain"),
    # websockets: the parser under uvicorn's protocol
    Internals(
        "websockets.server:ServerProtocol", "parser handshake_exc", SOCKET, "breaks cycles of a lost socket", "conn"
    ),
    Internals("websockets.server:ServerProtocol", "extensions fail", SOCKET, "leaves compressed sockets to it", "conn"),
    Internals("websockets.http11:Request", "headers", SOCKET, "forgets headers once they were read", "request"),
    Internals("websockets.http11:Response", "headers status_code", SOCKET, "knows whether it upgrades", "response"),
    Internals("websockets.frames", "apply_mask", "errata_server.serve.ws_frames", "unmasks payload in C"),
    Internals(
        "websockets.asyncio.client:ClientConnection",
        "transport",
        "errata_client.connections.driver",
        "drops a stuck socket",
    ),
    # starlette
    Internals("starlette.datastructures:State", "_state", "errata_server.app.adoption", "hands state on to mounts"),
    Internals(
        "starlette.applications:Starlette",
        "middleware_stack build_middleware_stack",
        "errata_server.serve.detached_sockets",
        "looks for middleware that would miss a detached socket",
    ),
    Internals("starlette.routing:Router", "lifespan_context", "errata_server.app", "starts the runtime with the app"),
    # OpenEnv's server
    Internals(
        "openenv.core.env_server.http_server:HTTPEnvServer",
        "_env_factory _concurrency_config",
        "errata_server.app",
        "serves the same factory and limits",
    ),
    Internals(
        "openenv.core.env_server.http_server:HTTPEnvServer",
        "_create_session _destroy_session _update_session_activity _start_reaper _stop_reaper",
        "errata_server.app.server",
        "lets /harness drive our sessions; under other names it would make environments of its own",
    ),
    Internals(
        "openenv.core.env_server.http_server",
        "_make_json_serializable",
        "errata_server.doors.mcp_tools",
        "answers tool results in upstream's bytes",
    ),
    Internals(
        "openenv.core.env_server._utils",
        "overrides_method",
        "errata_server.environments.placement",
        "tells async environments from blocking ones",
    ),
    Internals(
        "openenv.core.env_server.interfaces:Environment",
        "_apply_transform",
        "terminal_env",
        "applies a given transform",
    ),
    Internals(
        WEB,
        "_build_gradio_blocks _extract_action_fields _is_chat_env get_quick_start_markdown load_environment_metadata "
        "EpisodeState ActionLog",
        "errata_server.app.web",
        "builds upstream's pages on our sessions",
    ),
    Internals(f"{WEB}:WebInterfaceManager", "_send_state_update", "errata_server.app.web", "updates open pages"),
    Internals(
        "fastmcp.server.server:FastMCP",
        "middleware",
        "errata_server.environments.mcp_session",
        "finds out whether a server that instances share was prepared before",
    ),
    # OpenEnv's client
    Internals(
        "openenv.core.env_client",
        "_is_localhost_ws_url",
        "errata_client.connections.dialing",
        "leaves proxies out on loopback, as upstream",
    ),
    Internals(
        "openenv.core.env_client:EnvClient",
        "_base_url _ws_url _headers _ws _ws_loop _connect_timeout _message_timeout _max_message_size "
        "_websocket_ping_interval_s _websocket_ping_timeout_s",
        "errata_client.client",
        "connects as upstream's constructor was asked to",
    ),
    Internals(
        "openenv.core.env_client:EnvClient",
        "_connect_async _disconnect_async _close_async _send_and_receive _schedule_socket_close "
        "_drain_pending_close_tasks _start_provider_if_needed",
        "errata_client.doors.socket_client",
        "connects, sends and closes; under other names upstream's would run instead",
    ),
    Internals(
        "openenv.core.env_client:EnvClient",
        "_step_payload _parse_result _parse_state",
        "errata_client.client",
        "encodes and reads as upstream's typed clients",
    ),
    Internals(
        "openenv.core.env_client:EnvClient",
        "_child_clients _create_session_client _provider _sync_client _execution_mode _claim_execution_mode",
        "errata_client.client",
        "forks, and closes children and providers",
    ),
    Internals(
        "openenv.core.containers.runtime.providers:LocalDockerProvider",
        "_container_id",
        "errata_client.containers",
        "reads the log of a container that ended",
    ),
    Internals(
        "openenv.core.sync_client:SyncEnvClient",
        "_async _child_clients _claim_sync_mode _ensure_loop _stop_loop _loop _run",
        "errata_client.sync",
        "runs our client on upstream's thread",
    ),
    # the standard library
    Internals(
        "asyncio.base_events:BaseEventLoop",
        "_ready _scheduled _stopping _run_once _process_events _write_to_self",
        "errata_server.simulation.loop",
        "runs callbacks in virtual time",
    ),
    Internals(
        "asyncio.events:TimerHandle",
        "_when _scheduled _cancelled _run _args _callback",
        "errata_server.simulation.loop",
        "runs callbacks in virtual time",
    ),
    # what trains
    Internals(
        TRL,
        "_generate_and_score_completions _calculate_rewards _generate_single_turn _metrics _logs _tokenizer "
        "num_completions_to_print vllm_generation",
        "errata_trainer.recipes.trl.trainer",
        "adds the channels to GRPO's batch and loss",
    ),
    Internals(
        TRL,
        "_tool_call_loop _sync_tool_dicts _environment_pool _multi_environment environment_factories environments",
        PARALLEL,
        "runs the environments of a batch side by side",
    ),
    Internals(
        "transformers.trainer:Trainer",
        "_load_optimizer_and_scheduler",
        "errata_trainer.recipes.trl.trainer",
        "gives the teacher the checkpoint that the student goes on from",
    ),
    Internals(
        "trl.generation.vllm_generation:VLLMGeneration",
        "llm",
        "errata_trainer.recipes.trl.trainer",
        "knows how long a context a colocated vLLM takes",
    ),
    Internals("trl.chat_template_utils", "parse_response", "errata_trainer.recipes.trl.trainer", "reads sampled calls"),
    Internals(
        "transformers.configuration_utils:PreTrainedConfig",
        "_name_or_path",
        "errata_trainer.recipes.trl.trainer",
        "names the reference of stored pairs",
    ),
    Internals(
        "transformers.modeling_utils:PreTrainedModel",
        "_is_stateful",
        "errata_trainer.channels.forward",
        "shares no prefix where layers carry a state",
    ),
    Internals(
        "torch._dynamo.eval_frame:OptimizedModule",
        "_orig_mod",
        "errata_trainer.channels.heads",
        "finds a compiled model's head",
    ),
    Internals(
        "torch.nn.modules.dropout", "_DropoutNd", "errata_trainer.channels.forward", "finds dropout that is active"
    ),
    Internals(
        "docker.api.client:APIClient",
        "_url _raise_for_status",
        "errata_sandboxd.engine_client",
        "encodes every name in an address; under another name the SDK's own would be used, which leaves paths in them",
    ),
    Internals(
        "tarfile:TarInfo",
        "_proc_gnusparse_00 _proc_gnusparse_01 _proc_gnusparse_10",
        "errata_sandboxd.archives",
        "refuses sparse members before their maps are read",
    ),
    Internals(
        "tinker",
        "_base_client",
        "errata_trainer.recipes.tinker.service",
        "removes a finalizer, which closes connections of others",
    ),
    Internals(
        "tinker._base_client",
        "AsyncHttpxClientWrapper",
        "errata_trainer.recipes.tinker.service",
        "removes a finalizer, which closes connections of others",
    ),
    Internals("tarfile:TarFile", "members", "errata_sandboxd.archives", "forgets members that were copied"),
)

TRAINING = ("torch", "trl", "transformers")
OPTIONAL = {**dict.fromkeys(TRAINING, "make trainer"), "docker": "the extra docker", "tinker": "make trainer"}
"""Packages that not every environment has, and what installs them."""
UNDOCUMENTED = ("uvicorn",)
"""Packages whose classes promise no member at all to those who inherit from them."""

KNOWN_OBJECTS = {"app", "config", "loop", "queue", "scope", "transport", "writable"}
"""Attributes of uvicorn's protocols that hold what is documented (asyncio, ASGI, `uvicorn.Config`) or ours."""

PLAIN = {"_exit", "_make", "_replace", "_Decompress", "_set_running_loop"}
"""Documented names that begin with an underscore: of `os`, of named tuples, of zlib's types, and of
`asyncio.events`, for those who write event loops."""

OF_VERL = {"_autocast_dtype", "_add_batch_to_generate", "_clear_groups", "_ROLLOUT_REGISTRY"}
"""Private names of VeRL, which has an environment of its own: tests/verl/test_internals.py looks for them."""

BY_METACLASS = {"_abc_impl", "_backward_cls"}
"""Names that a class has because its metaclass (abc's, torch's) puts them there."""


def installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None  # the directory docker/ is no package


def each() -> Iterator[Any]:
    for entry in INTERNALS:
        package = entry.where.split(".")[0]
        why = f"{package} is not installed ({OPTIONAL.get(package)}); make test runs this"
        marks = [pytest.mark.skipif(not installed(package), reason=why)] if package in OPTIONAL else []
        for name in entry.names.split():
            yield pytest.param(entry, name, marks=marks, id=f"{entry.where}.{name}")


@pytest.mark.parametrize(("entry", "name"), list(each()))
def test_an_internal_is_where_it_was(entry: Internals, name: str) -> None:
    assert name in members(entry.where), moved(entry, name)


def moved(entry: Internals, name: str) -> str:
    package = entry.where.split(".")[0]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        package, version = "Python", platform.python_version()
    return (
        f"{package} {version} has no {entry.where}.{name}. {entry.user} {entry.purpose} with it: adapt that module, or "
        f"exclude {package} {version} in pyproject.toml"
    )


def members(where: str) -> set[str]:
    """Return the names of a module, or those of a class with what its methods assign to ``self``."""
    module_name, _, class_name = where.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        pytest.fail(f"there is no module {module_name}: {error}. What is listed under it has moved")
    if not class_name:
        return set(vars(module))
    assert hasattr(module, class_name), f"{module_name} has no {class_name}. What is listed under it has moved"
    return members_of(getattr(module, class_name))


@functools.cache
def members_of(cls: type) -> set[str]:
    found = set()
    for base in cls.__mro__[:-1]:
        found |= set(vars(base)) | set(getattr(base, "__annotations__", ()))
        found |= {
            node.attr for node in ast.walk(source_of(base)) if is_of_self(node) and isinstance(node.ctx, ast.Store)
        }
    return found


@functools.cache
def source_of(cls: type) -> ast.Module:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # made in C, or at run time: `vars` has what there is
        return ast.Module([], [])


def is_of_self(node: ast.AST) -> bool:
    """Whether it is ``self.name`` or ``super().name``."""
    if not isinstance(node, ast.Attribute):
        return False
    value = node.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super"
    return isinstance(value, ast.Name) and value.id == "self"


# -- nothing is missing in the list --------------------------------------------------------------------------------


def modules() -> Iterator[ModuleType]:
    for package in OURS:
        if package in ("errata_trainer", "errata_ablation") and not all(map(installed, TRAINING)):
            continue
        top = importlib.import_module(package)
        yield top
        for found in pkgutil.walk_packages(top.__path__, f"{package}."):
            run_elsewhere = ".server.runtime." in found.name or ".tasks." in found.name or ".launcher." in found.name
            # tests/verl, tests/monarch, tests/cookbook and tests/gem have environments of their own
            elsewhere = ("verl", "monarch", "tinker.env", "cartridge.replica", "roll.env", "roll.manager")
            apart = found.name.startswith(tuple(f"errata_trainer.recipes.{name}" for name in elsewhere))
            if not (run_elsewhere or apart) and not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)


def foreign_bases(cls: type) -> list[type]:
    """Return the bases that come from packages in the list."""
    listed = {entry.where.split(".")[0] for entry in INTERNALS}
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] in listed]


def test_every_member_of_a_foreign_base_that_we_use_or_override_is_listed() -> None:
    missing: set[str] = set()
    checked = 0
    for cls in {value for module in modules() for value in vars(module).values() if inspect.isclass(value)}:
        bases = foreign_bases(cls)
        if cls.__module__.split(".")[0] not in OURS or not bases:
            continue
        checked += 1
        theirs: set[str] = set().union(*map(members_of, bases))
        whole = bases[0].__module__.split(".")[0] in UNDOCUMENTED
        listed = {name for entry in INTERNALS if is_about(entry, bases) for name in entry.names.split()}
        for ours in cls.__mro__:
            if ours.__module__.split(".")[0] in OURS:
                used = (uses(ours) | vars(ours).keys()) & theirs
                used = {name for name in used if not name.startswith("__") and (whole or name.startswith("_"))}
                used -= BY_METACLASS
                missing |= {f"{ours.__qualname__} uses {bases[0].__qualname__}.{name}" for name in used - listed}
                if whole:
                    missing |= unlisted_of_held(ours, theirs)
    assert checked > 10
    assert not missing, "not in INTERNALS: " + "; ".join(sorted(missing))


def is_about(entry: Internals, bases: list[type]) -> bool:
    module, _, name = entry.where.partition(":")
    return any((base.__module__, base.__qualname__) == (module, name) for base in bases)


def uses(cls: type) -> set[str]:
    return {node.attr for node in ast.walk(source_of(cls)) if is_of_self(node)}


def unlisted_of_held(cls: type, theirs: set[str]) -> set[str]:
    """Return what a class reads of objects that uvicorn keeps (``self.conn.parser``) and the list does not have."""
    listed = {(entry.held_as, name) for entry in INTERNALS for name in entry.names.split()}
    read = {
        (node.value.attr, node.attr)
        for node in ast.walk(source_of(cls))
        if isinstance(node, ast.Attribute) and is_of_self(node.value)
    }
    return {
        f"{cls.__qualname__} uses self.{held}.{name}"
        for held, name in read - listed
        if held in theirs - KNOWN_OBJECTS and held not in vars(cls)
    }


def test_every_private_name_of_another_package_that_we_read_is_listed() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in our_files()}
    assert len(trees) > 200
    ours = {name for tree in trees.values() for name in defined(tree)}
    listed = {name for entry in INTERNALS for name in entry.names.split()}
    missing = set()
    for path, tree in trees.items():
        for name, line in private_reads(tree):
            if name not in ours | listed | PLAIN | OF_VERL:
                missing.add(f"{path.relative_to(ROOT)}:{line} {name}")
    assert not missing, "not in INTERNALS: " + "; ".join(sorted(missing))


def our_files() -> Iterator[Path]:
    for source in SOURCES:
        for path in (ROOT / source).rglob("*.py"):
            if "tasks" not in path.parts:
                yield path


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines, and the attributes that it assigns or has slots for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Assign) and "__slots__" in [ast.unparse(to) for to in node.targets]:
            yield from (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))


def private_reads(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield private names with their lines: imported, read as an attribute, or by getattr and hasattr."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and node.module
            and node.module.split(".")[0] not in OURS
        ):
            yield from ((alias.name, node.lineno) for alias in node.names if is_private(alias.name))
            if any(map(is_private, node.module.split("."))):
                yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)):
                yield str(name), node.lineno


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# -- the test itself -----------------------------------------------------------------------------------------------


def test_the_message_names_package_version_and_module() -> None:
    entry = next(entry for entry in INTERNALS if entry.names.startswith("handshake_complete"))
    said = moved(entry, "close_sent")
    assert importlib.metadata.version("uvicorn") in said and "uvicorn_protocols" in said and "close_sent" in said
    assert "no_such_name" not in members(entry.where)


def test_a_private_name_that_nobody_defines_is_found() -> None:
    tree = ast.parse("from uvicorn._types import ASGIApp\nserver._loop_factory\ngetattr(x, '_hidden', 1)\nself.__x")
    assert [name for name, _ in private_reads(tree)] == ["ASGIApp", "_loop_factory", "_hidden"]
