"""What a Dockerfile does to a sandbox, read without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_server.sandbox.spec import Symlink
from terminal_env.server.dockerfile import DockerfileInvalid, Placed, Recipe, Run, read
from terminal_env.server.tasks import TaskInvalid, read_task

from .harbor_style import write


def made(tmp_path: Path, text: str, **files: str) -> Recipe:
    """Read a Dockerfile beside files, whose names have ``__`` for a slash."""
    context = tmp_path / "environment"
    for name, content in {"a.txt": "a\n", "src/b.txt": "b\n", "src/deep/c.sh": "c\n", **files}.items():
        path = context / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (context / "Dockerfile").write_text(text)
    return read(context)


def files(recipe: Recipe) -> dict[str, str]:
    """Return what stands where at the start: content by path."""
    found = {}
    for placed in recipe.start:
        if isinstance(placed, Placed) and not placed.is_directory:
            found[placed.path] = (placed.text or b"").decode() if placed.source is None else placed.source.read_text()
    return found


def directories(recipe: Recipe) -> dict[str, str]:
    """Return the directories of the start and their owners."""
    return {placed.path: placed.owner for placed in recipe.start if isinstance(placed, Placed) and placed.is_directory}


@pytest.mark.parametrize(
    ("copy", "where"),
    [
        ("COPY a.txt /app/a.txt", ["/app/a.txt"]),
        ("COPY a.txt /app", ["/app/a.txt"]),
        ("COPY a.txt /app/", ["/app/a.txt"]),
        ("COPY a.txt .", ["/app/a.txt"]),
        ("COPY a.txt ./", ["/app/a.txt"]),
        ("COPY a.txt other.txt", ["/app/other.txt"]),
        ("COPY src /app/src", ["/app/src/b.txt", "/app/src/deep/c.sh"]),
        ("COPY src/ ./", ["/app/b.txt", "/app/deep/c.sh"]),
        ("COPY a.txt src x/", ["/app/x/a.txt", "/app/x/b.txt", "/app/x/deep/c.sh"]),
        ('COPY ["a.txt", "/data dir/"]', ["/data dir/a.txt"]),
        ("COPY *.txt /data/", ["/data/a.txt"]),
        ("COPY src/d* /data/", ["/data/c.sh"]),
        ("COPY --chown=root:root --chmod=0600 --link a.txt /opt/tool/", ["/opt/tool/a.txt"]),
        ("copy a.txt \\\n   # why\n\n   /app/two.txt", ["/app/two.txt"]),
        ("ADD a.txt /app/", ["/app/a.txt"]),
        ("COPY a.txt /etc/app/a.txt", ["/etc/app/a.txt"]),
        ("COPY <<EOF /app/made\nhello\nEOF", ["/app/made"]),
    ],
)
def test_copy_puts_files_where_docker_does(tmp_path: Path, copy: str, where: list[str]) -> None:
    recipe = made(tmp_path, f"FROM ubuntu\nWORKDIR /app\n{copy}\n")
    assert not recipe.needs_image and sorted(files(recipe)) == sorted(where)
    assert recipe.workdir == "/app"


def test_all_of_the_context_goes_with_a_dot_but_for_what_is_ignored(tmp_path: Path) -> None:
    ignore = {".dockerignore": "# no\n*.log\n**/deep\n!keep.log\nDockerfile\n"}
    recipe = made(tmp_path, "FROM x\nWORKDIR /app\nCOPY . .\n", **ignore, **{"x.log": "", "keep.log": ""})
    assert sorted(files(recipe)) == ["/app/.dockerignore", "/app/a.txt", "/app/keep.log", "/app/src/b.txt"]


def test_directories_belong_to_the_agent_but_not_those_of_the_system(tmp_path: Path) -> None:
    recipe = made(
        tmp_path,
        "FROM x\nWORKDIR /srv/site/www\nRUN mkdir -p /data/in logs /var/www /logs/verifier && mkdir /usr/share/thing\n"
        "COPY a.txt /usr/local/bin/tool\nRUN chmod 755 /usr/local/bin/tool && ln -s /srv/site /etc/site\n",
    )
    assert not recipe.needs_image, recipe.needs_image
    owners = directories(recipe)
    agents = {"/srv/site", "/srv/site/www", "/data", "/data/in", "/srv/site/www/logs", "/var/www"}
    assert {path for path, owner in owners.items() if owner == "agent"} == agents
    assert owners["/usr/share/thing"] == "root"
    (tool,) = (p for p in recipe.start if isinstance(p, Placed) and p.path == "/usr/local/bin/tool")
    assert (tool.owner, tool.mode) == ("root", 0o755)
    assert Symlink("/etc/site", "/srv/site") in recipe.start
    assert not recipe.steps


def test_variables_are_replaced_as_docker_does(tmp_path: Path) -> None:
    recipe = made(
        tmp_path,
        "ARG BASE=ubuntu\nFROM ${BASE}:24.04\nARG DIR=app\nARG NONE\n"
        'ENV A=1 B="two words" C=${NONE:-none}$A\nENV D=$A-${B} OLD style text\nENV LEGACY some text\n'
        "ENV PATH=/$DIR/bin:$PATH Q='$A' R=\\$A S=${A:+set}\nWORKDIR /$DIR\nCOPY a.txt ${A}.txt\n",
    )
    assert recipe.env["B"] == "two words" and recipe.env["C"] == "none", "a variable is not seen in its own instruction"
    assert recipe.env["D"] == "1-two words"
    assert recipe.env["LEGACY"] == "some text"
    assert recipe.env["PATH"].startswith("/app/bin:/usr/local/sbin:")
    assert (recipe.env["Q"], recipe.env["R"], recipe.env["S"]) == ("$A", "$A", "set")
    assert files(recipe) == {"/app/1.txt": "a\n"}


def test_file_commands_run_in_their_order(tmp_path: Path) -> None:
    recipe = made(
        tmp_path,
        "FROM x\nENV N=5\nWORKDIR /app\nCOPY a.txt .\n"
        'RUN set -eux; cp a.txt b.txt && echo "n; $N" > n.txt && touch "c d" ; rm -rf /var/lib/apt/lists/*\n'
        "COPY src/b.txt later.txt\n",
    )
    run, copy = recipe.steps
    assert isinstance(run, Run) and (run.cwd, run.env["N"]) == ("/app", "5")
    assert run.command == 'cp a.txt b.txt && echo "n; $N" > n.txt && touch "c d"'
    assert not isinstance(copy, Run) and [entry.path for entry in copy.entries] == ["/app/later.txt"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("RUN apt-get update && apt-get install -y jq", "apt-get"),
        ("RUN pip install --no-cache-dir numpy", "pip"),
        ("RUN python3 setup.py", "python3"),
        ("RUN mkdir /data && curl -fsSL https://example.com/x | tar xz", r"a script \(\|\)"),
        ("RUN echo $(date) > /app/now", "a script"),
        ("RUN <<EOF\napt-get update\nEOF", "a script"),
        ("RUN --mount=type=cache,target=/x mkdir /data", "--mount"),
        ("RUN echo x > /etc/passwd", "/etc is the system's"),
        ("RUN touch /ready", "the system's"),
        ("RUN rm /usr/bin/python3", "the system's"),
        ("RUN mkdir -p /tests/own/x /verifier", "/verifier is for the grading"),
        ("USER nobody", "user nobody"),
        ("USER 1000:1000", "user 1000"),
        ("COPY --chown=www-data a.txt /app/", "www-data"),
        ("COPY --from=builder /x /app/x", "another image or stage"),
        ("FROM alpine", "several stages"),
        ("ADD https://example.com/x /app/x", "download"),
        ("ADD src.tar.gz /app/", "archive"),
        ("WORKDIR /usr/local/bin", "belongs to the system"),
        ("WORKDIR /", "belongs to the system"),
        ("COPY a.txt /proc/x", "kernel"),
    ],
)
def test_a_line_that_needs_an_image_refuses_the_task_and_is_named(tmp_path: Path, line: str, words: str) -> None:
    text = f"FROM ubuntu:24.04\n\nWORKDIR /app\n{line}\n"
    root = write(
        tmp_path / "t", **{"environment/Dockerfile": text, "environment/a.txt": "", "environment/src.tar.gz": ""}
    )
    with pytest.raises(
        TaskInvalid, match=rf"needs an image: environment/Dockerfile line 4: .*{words}.*\[errata\] base"
    ):
        read_task(root)
    (root / "task.toml").write_text('[errata]\nbase = "prepared"\n')
    task = read_task(root)
    assert task.base == "prepared"
    assert any("line 4" in note and "base tree prepared" in note for note in task.notes)


def test_all_lines_that_need_an_image_are_counted(tmp_path: Path) -> None:
    text = "FROM ubuntu\nRUN apt-get update\nWORKDIR /app\nRUN pip install x\nUSER www\n"
    with pytest.raises(TaskInvalid, match=r"line 2: RUN apt-get update .*; so do lines 4, 5"):
        read_task(write(tmp_path / "t", **{"environment/Dockerfile": text}))


@pytest.mark.parametrize(
    "line",
    [
        *("USER root", "USER 0:0", "USER agent", 'CMD ["x"]', "ENTRYPOINT x", "EXPOSE 80", "LABEL a=b"),
        *('SHELL ["/bin/bash", "-c"]', "HEALTHCHECK NONE", "VOLUME /x"),
    ],
)
def test_lines_that_change_nothing_here_are_harmless(tmp_path: Path, line: str) -> None:
    assert not made(tmp_path, f"FROM x\n{line}\n").needs_image


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("COPY a b\n", "FROM has to come first"),
        ("", "no FROM"),
        ("FROM x\nCOPY missing.txt /app/\n", "line 2: COPY missing.txt /app/: missing.txt is not in environment/"),
        ("FROM x\nCOPY ../secret /app/\n", "outside of environment/"),
        ("FROM x\nCOPY a.txt\n", "needs a source and a destination"),
        ("FROM x\nCOPY a.txt src/b.txt /app/one\n", "ends with /"),
        ("FROM x\nCOPPY a.txt /app/\n", "no Dockerfile instruction"),
        ("FROM x\nCOPY <<EOF /app/x\nno end\n", "has no end"),
        ('FROM x\nCOPY "a.txt /app/\n', "a quote has no end"),
    ],
)
def test_what_docker_cannot_build_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DockerfileInvalid, match=words):
        made(tmp_path, text)


def test_a_link_in_the_context_cannot_bring_files_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "leak").symlink_to("/etc/hostname")
    with pytest.raises(DockerfileInvalid, match="leads out of environment/"):
        made(tmp_path, "FROM x\nCOPY leak /app/\n")


def test_services_and_images_need_an_image_too(tmp_path: Path) -> None:
    compose = {"environment/docker-compose.yaml": "services:\n  main: {}\n  db:\n    image: postgres\n"}
    with pytest.raises(TaskInvalid, match=r"services db, main"):
        read_task(write(tmp_path / "a", **compose))
    alone = {"environment/docker-compose.yaml": "services:\n  main:\n    build: .\n"}
    assert any("docker-compose.yaml is not used" in note for note in read_task(write(tmp_path / "b", **alone)).notes)
    root = write(tmp_path / "c", **{"task.toml": '[environment]\ndocker_image = "x/y:1"\n'})
    assert read_task(root).workdir == "/app", "the Dockerfile says the same"
    (root / "environment" / "Dockerfile").unlink()
    with pytest.raises(TaskInvalid, match="docker_image = 'x/y:1'"):
        read_task(root)
