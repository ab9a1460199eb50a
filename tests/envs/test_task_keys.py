"""Keys of task.toml in Harbor's format: followed, without effect here, or refused by name; none is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from terminal_env.server.task_keys import VARIABLES_VARIABLE
from terminal_env.server.tasks import Task, TaskInvalid, read_task

from .harbor_style import PLAIN_PYTEST, TOML
from .scripted import write_task

REFUSED = {
    "steps": '[[steps]]\nname = "one"\n',
    "[environment] os": '[environment]\nos = "windows"\n',
    "[environment] gpus": "[environment]\ngpus = 1\n",
    "[environment] tpu": '[environment.tpu]\ntype = "v5e"\n',
    "[environment] mcp_servers": '[[environment.mcp_servers]]\nname = "files"\n',
    "[environment] skills_dir": '[environment]\nskills_dir = "/skills"\n',
    "[environment] healthcheck": '[environment.healthcheck]\ncommand = "true"\n',
    "[environment] workdir": '[environment]\nworkdir = "/srv"\n',
    "[environment] a_new_key": "[environment]\na_new_key = 1\n",
    "[verifier] user": '[verifier]\nuser = "postgres"\n',
    "[verifier] environment_mode": '[verifier]\nenvironment_mode = "separate"\n',
    "[verifier] environment": '[verifier.environment]\ndocker_image = "x"\n',
    "[verifier] collect": '[[verifier.collect]]\ncommand = "true"\n',
    "[verifier] timeout_secs": "[verifier]\ntimeout_secs = 5\n",
    "[agent] user": '[agent]\nuser = "ubuntu"\n',
    "[agent] prompt": '[agent]\nprompt = "Think."\n',
    "[solution] user": '[solution]\nuser = "root"\n',
    "[errata] determinstic": "[errata]\ndeterminstic = true\n",
    "services": '[[services]]\nname = "db"\n',
    "[environment.env] '1X'": '[environment.env]\n1X = "a"\n',
    "[solution.env] A": "[solution.env]\nA = [1]\n",
    "[verifier.env] A: NOT_SET is not set": '[verifier.env]\nA = "${NOT_SET}"\n',
    "[verifier.env] A: ${a b}": '[verifier.env]\nA = "x${a b}"\n',
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_changes_the_task_and_cannot_be_followed_refuses_it_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskInvalid) as caught:
        read_task(write_task(tmp_path / "t", {"task.toml": REFUSED[name]}))
    assert str(caught.value).startswith("task t: task.toml: " + name)


def test_a_task_of_steps_is_refused_for_its_steps_whatever_else_is_missing(tmp_path: Path) -> None:
    root = write_task(tmp_path / "t", {"task.toml": '[[steps]]\nname = "one"\n'})
    (root / "instruction.md").unlink()
    with pytest.raises(TaskInvalid, match="a task of several steps cannot be served"):
        read_task(root)


def test_every_key_of_an_ordinary_task_is_accepted(tmp_path: Path) -> None:
    toml = (
        'schema_version = "1.1"\nsource = "x"\nartifacts = ["/app/out"]\n[task]\nname = "org/name"\nkeywords = []\n'
        '[[task.authors]]\nname = "A"\n[metadata]\nanything = { at = "all" }\n'
        '[verifier]\ntimeout_sec = 60\nuser = "root"\nenvironment_mode = "shared"\n'
        '[agent]\ntimeout_sec = 60\nuser = "agent"\n'
        '[environment]\nos = "Linux"\ncpus = 2\nmemory_mb = 2048\nstorage_mb = 1\ngpus = 0\ngpu_types = ["H100"]\n'
        "allow_internet = false\nmcp_servers = []\nbuild_timeout_sec = 600.0\n[environment.env]\n[solution.env]\n"
    )
    for text in (toml, TOML):
        assert not read_task(write_task(tmp_path / "t", {"task.toml": text})).warnings


def test_a_single_value_beside_the_tables_is_named_and_not_used(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "t", {"task.toml": 'author = "A"\n'}))
    assert task.warnings == ("task.toml: author is not used",) and task.warnings[0] in task.public(0)["notes"]


def variables(root: Path, table: str, value: str) -> Task:
    return read_task(write_task(root, {**PLAIN_PYTEST, "task.toml": f'[{table}.env]\nA = "{value}"\n'}))


@pytest.mark.parametrize(
    ("value", "resolved"),
    [
        ("plain $X text", "plain $X text"),
        ("${MODE}", "strict"),
        ("${MODE:-lenient}", "strict"),
        ("${NOT_SET:-a:-b c}", "a:-b c"),
        ("${NOT_SET:-}", ""),
        ("${NOT_SET:-{'a': [1, {}]}}", "{'a': [1, {}]}"),
        ("${NOT_SET:-${MODE}}", "strict"),
        ("${MODE:-${NOT_SET}}", "strict"),
        ("http://${NOT_SET:-localhost}:${PORT_OF_IT:-80}/", "http://localhost:80/"),
    ],
)
def test_templates_are_resolved_in_each_table_of_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, resolved: str
) -> None:
    monkeypatch.setenv("MODE", "strict")
    assert variables(tmp_path / "t", "environment", value).env == {"A": resolved}
    assert variables(tmp_path / "t", "errata", value).env == {"A": resolved}
    assert variables(tmp_path / "t", "verifier", value).verifier_env == {"A": resolved}
    assert variables(tmp_path / "t", "solution", value).solution_env == {"A": resolved}


@pytest.mark.parametrize(
    "name",
    [
        *("ERRATA_ANYTHING", "OPENAI_API_KEY", "HF_TOKEN", "PGPASSWORD", "DATABASE_URL", "PATH", "HOME", "JWT", "PAT"),
        *("AZURE_STORAGE_CONNECTION_STRING", "SLACK_WEBHOOK", "DATABASEURL", "MONGODB", "REDIS", "SIGNING_SALT"),
        *("HOSTNAME", "LOGNAME", "SSH_CLIENT", "KUBECONFIG", "XDG_RUNTIME_DIR", "VIRTUAL_ENV", "OTP_SEED", "CONN_STR"),
    ],
)
def test_a_task_cannot_read_a_secret_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "hidden-value")
    for value in (f"${{{name}}}", f"${{{name}:-none}}"):
        with pytest.raises(
            TaskInvalid, match=rf"{name} belongs to this machine or could be a secret: {VARIABLES_VARIABLE}={name}"
        ) as caught:
            variables(tmp_path / "t", "environment", value)
        assert "hidden-value" not in str(caught.value)
    monkeypatch.setenv(VARIABLES_VARIABLE, f"OTHER, {name}")
    assert variables(tmp_path / "t", "environment", value).env == {"A": "hidden-value"}


def test_the_digests_follow_the_values_of_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for mode in ("strict", "lenient"):
        monkeypatch.setenv("MODE", mode)
        task = variables(tmp_path / "t", "verifier", "${MODE}")
        seen |= {task.digest, task.whole_digest}
    assert len(seen) == 4


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "true", "'many'"])
def test_a_maximum_is_a_finite_number_above_0(tmp_path: Path, value: str) -> None:
    with pytest.raises(TaskInvalid, match=r"\[errata\] max_score must be a (finite )?number"):
        read_task(write_task(tmp_path / "t", {**PLAIN_PYTEST, "task.toml": f"[errata]\nmax_score = {value}\n"}))


def test_a_maximum_is_for_test_sh_only(tmp_path: Path) -> None:
    with pytest.raises(TaskInvalid, match=r"max_score is for tests/test\.sh"):
        read_task(write_task(tmp_path / "t", {"task.toml": "[errata]\nmax_score = 10\n"}))
