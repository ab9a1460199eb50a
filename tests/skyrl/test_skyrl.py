"""The recipe's arithmetic and alignment on a server that is not ours: SkyRL's, whose scores have no first entry."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_trainer.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skyrl

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".cache" / "skyrl" / "bin" / "python"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("trainer_adapter", "protocol", "client")),
    "TINKER_API_KEY": "tml-test",
    "TINKER_TELEMETRY": "0",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer(["any text"])
    tiny_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server; its first answer to a client compiles for most of a minute."""
    data = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, HERE / "launcher.py", model, str(port), data]
    with (data / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=data, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        while True:
            try:
                httpx.get(f"{address}/api/v1/healthz", timeout=10)
                break
            except httpx.TransportError:
                assert process.poll() is None, (data / "log").read_text()[-2000:]
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait()


@pytest.fixture(scope="module")
def found(model: Path, url: str) -> dict[str, Any]:
    command = [PYTHON, HERE / "client.py", model, url]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_scores_without_a_first_entry_stand_at_their_tokens(found: dict[str, Any]) -> None:
    assert found["entries"] == -1
    assert found["score to sampling"] < 1e-5
    assert found["score to transformers"] < 1e-5
    assert found["teacher to transformers"] < 1e-5


def test_the_loss_is_minus_the_sum_of_ratio_times_advantage(found: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(-6 * 1.0 + 6 * 0.5, abs=1e-4)


def test_a_step_moves_the_student_towards_the_teacher(found: dict[str, Any]) -> None:
    assert found["capabilities"] == [False, False] and found["form"] == "sampled"
    assert found["tokens"] == 12
    assert found["agreement"] > 0


def test_scores_of_other_weights_are_refused(found: dict[str, Any]) -> None:
    assert "score before refresh" in found["guard"]
