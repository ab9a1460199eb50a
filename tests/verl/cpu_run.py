"""VeRL's own commands in a process of their own, on one Ray cluster, on a CPU, in an environment of a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow.parquet
import pytest
import ray
import yaml

from errata_server.process import ServerProcess
from errata_trainer.recipes.verl import dataset as dataset_module
from errata_trainer.recipes.verl import write_dataset
from errata_trainer.tiny import tiny_model, tiny_tokenizer

from ..environments.killed import KILLED
from .scripts import ACTIONS

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500.0
PLUGIN = "tests.verl.cpu_plugin"
VARIABLES = {
    "VERL_PLATFORM": "cpu",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables of all processes."""


class Cluster:
    """A Ray cluster of this machine, which one command after the other uses.

    Attributes:
        address: Address that a command connects to.
    """

    def __init__(self) -> None:
        # What a command sets for itself alone does not reach Ray's processes, which are children of the cluster.
        os.environ.update(
            VARIABLES, PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        )
        self._directory = tempfile.TemporaryDirectory(
            prefix="ray", ignore_cleanup_errors=True
        )  # sockets' names are short
        ray.init(
            address="local",
            num_cpus=16,
            num_gpus=2,
            include_dashboard=False,
            _temp_dir=self._directory.name,
            log_to_driver=False,
        )
        self.address: str = ray.get_runtime_context().gcs_address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._directory.cleanup()


class KeptServer:
    """``errata serve`` in a process of its own, which is started again on its port whenever it is killed.

    Args:
        target: What to serve, as on the command line.
        data_dir: Data directory.

    Attributes:
        url: URL of the server.
        deaths: Number of times that it was started again.
    """

    def __init__(self, target: str, data_dir: Path) -> None:
        self._target, self._data_dir, self._stopping = target, data_dir, False
        self._server = self._begun()
        self.url, self.deaths = self._server.url, 0
        self._thread = threading.Thread(target=self._keep, name="kept-server")

    def _begun(self, *options: str) -> ServerProcess:
        env = {KILLED: str(self._data_dir / "killed"), "ERRATA_SWE_STORE": str(self._data_dir / "swe")}
        self._data_dir.mkdir(exist_ok=True)
        return ServerProcess(self._target, self._data_dir, *options, env=env)

    def _keep(self) -> None:
        while self._server.process.wait() == -signal.SIGKILL and not self._stopping:
            self._server = self._begun("--port", self.url.rsplit(":", 1)[1])
            self.deaths += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._server.stop()
        self._thread.join()


def prepared(
    directory: Path,
    tasks: Sequence[dict[str, Any]],
    patch: pytest.MonkeyPatch,
    *,
    env: str = "shelf",
    texts: Sequence[str] = (),
) -> None:
    """Write a model and a data set of tasks, each with a prompt of its own.

    Args:
        directory: Directory to write to.
        tasks: Arguments of ``reset`` of each row.
        patch: Pytest's fixture.
        env: Name of the environment.
        texts: More texts that are to take few tokens: each pass pays for the longest row.
    """
    samples = ["One of red, green, blue holds a word. Submit it. Not in der.", *ACTIONS, *texts]
    tokenizer = tiny_tokenizer(samples, vocab_size=2048)
    tokenizer.save_pretrained(directory / "model")
    tiny_model(tokenizer).save_pretrained(directory / "model")
    rows = []
    for number, task in enumerate(tasks):
        patch.setattr(dataset_module, "offered_tasks", lambda *_, task=task, **__: [task])
        write_dataset(directory / "row.parquet", "http://none", env, prompt=f"Number {number}. ")
        rows.append(pyarrow.parquet.read_table(directory / "row.parquet"))
    pyarrow.parquet.write_table(pyarrow.concat_tables(rows), directory / "train.parquet")


def trained(
    directory: Path,
    url: str,
    cluster: Cluster,
    *more: str,
    env: str = "shelf",
    plugin: str = PLUGIN,
    stock: bool = False,
) -> list[dict[str, float]]:
    """Run VeRL's trainer to its end, and return what VeRL logged in each step.

    Args:
        directory: Directory that `prepared` filled.
        url: URL of the server.
        cluster: Cluster that the trainer runs on.
        *more: More arguments of the command.
        env: Name of the environment.
        plugin: Module with the plugin.
        stock: Whether the command is VeRL's own instead of that of the recipe.
    """
    output, logged = directory / "output.txt", directory / "log.jsonl"
    logged.unlink(missing_ok=True)
    modules = [plugin, *(["errata_trainer.recipes.verl"] if stock else [])]
    of_processes = {"VERL_FILE_LOGGER_PATH": str(logged), "VERL_USE_EXTERNAL_MODULES": f"'{','.join(modules)}'"}
    arguments = [
        f"+ray_kwargs.ray_init.address={cluster.address}",
        *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{name}={value}" for name, value in of_processes.items()),
        *more,
    ]
    of_command = {
        "PYTHON": sys.executable,
        "DIRECTORY": str(directory),
        "ERRATA_URL": url,
        "ERRATA_ENV": env,
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
    }
    command = [*_stock_command(directory, url, env)] if stock else ["examples/verl/run_cpu.sh"]
    with (
        output.open("w") as file,
        subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env={**os.environ, **of_command},
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            process.wait(LIMIT_S)
        except BaseException:
            process.send_signal(signal.SIGINT)  # its actors end with it
            raise
    assert process.returncode == 0, output.read_text()[-6000:]
    steps = map(json.loads, logged.read_text().splitlines())
    return [{name: float(value) for name, value in step["data"].items()} for step in steps]


def _stock_command(directory: Path, url: str, env: str) -> Iterator[str]:
    """Yield VeRL's own command with the settings of ``examples/verl/cpu.yaml``."""
    yield from (sys.executable, "-m", "verl.trainer.main_ppo")
    settings = yaml.safe_load((ROOT / "examples/verl/cpu.yaml").read_text())
    del settings["defaults"], settings["hydra"]
    yield from (f"++{name}={value}" for name, value in _flat(settings))
    yield from (f"++errata.url={url}", f"++errata.env={env}", f"hydra.run.dir={directory}/hydra")
    yield from (f"data.{name}_files={directory}/train.parquet" for name in ("train", "val"))
    yield f"actor_rollout_ref.model.path={directory}/model"
    yield "actor_rollout_ref.rollout.agent.default_agent_loop=errata"
    yield from ("algorithm.adv_estimator=grpo_composer", "actor_rollout_ref.rollout.calculate_log_probs=true")
    yield "actor_rollout_ref.actor.strategy=fsdp2"


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a nested mapping with their names in dots."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", "[" + ",".join(value) + "]" if isinstance(value, list) else value
