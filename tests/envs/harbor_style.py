"""Tasks as Harbor and terminal-bench have them: WORKDIR, COPY, solution/solve.sh, a test.sh that fetches its tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .scripted import write_task

REWARD = """if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""

UVX = f"""#!/bin/bash

apt-get update
apt-get install -y curl

curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh

source $HOME/.local/bin/env

uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

{REWARD}"""
"""The script that most tasks of terminal-bench have, in their own order of steps."""

TOML = """version = "1.0"

[metadata]
difficulty = "easy"
category = "data"

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 900.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory = "2G"
storage = "10G"
allow_internet = true
"""

ERRORS_BY_HOUR = {
    "task.toml": TOML,
    "instruction.md": (
        "Count the lines with level ERROR for each hour in `/app/access.log`. Write a JSON object to "
        "`/app/hours.json`: the hour (two digits) to the count, hours without errors left out.\n"
    ),
    "environment/Dockerfile": "FROM ubuntu:24.04\n\nWORKDIR /app\n\nCOPY access.log /app/access.log\n",
    "environment/access.log": (
        "09:01:12 INFO start\n09:40:00 ERROR disk\n10:02:09 ERROR net\n10:30:00 WARN slow\n10:59:59 ERROR net\n"
    ),
    "solution/solve.sh": (
        "#!/bin/bash\nset -e\ncd /app\npython3 - <<'EOF'\nimport json, collections\n"
        "c = collections.Counter(l[:2] for l in open('/app/access.log') if ' ERROR ' in l)\n"
        "json.dump(c, open('/app/hours.json', 'w'))\nEOF\n"
    ),
    "tests/test.sh": UVX,
    "tests/test_outputs.py": (
        "import json\nfrom pathlib import Path\n\n\ndef test_counts():\n"
        "    assert json.loads(Path('/app/hours.json').read_text()) == {'09': 1, '10': 2}\n\n\n"
        "def test_log_is_unchanged():\n    assert Path('/app/access.log').read_text().count('\\n') == 5\n"
    ),
}

BROKEN_SCRIPT = {
    "task.toml": TOML,
    "instruction.md": "`/app/bin/total` should print the sum of the numbers in /data/in/*.txt. Repair it.\n",
    "environment/Dockerfile": (
        "# a task with directories of its own\nFROM python:3.13-slim-bookworm\nARG DATA=/data\nENV MODE=strict \\\n"
        "    DATA_DIR=${DATA}/in\nWORKDIR /app\nCOPY bin/ ./bin/\nCOPY one.txt two.txt ${DATA}/in/\n"
        "RUN mkdir -p /srv/out && chmod +x bin/total \\\n    && ln -s /app/bin/total /usr/local/bin/total\n"
        'CMD ["bash"]\n'
    ),
    "environment/bin/total": "#!/bin/bash\ncat $DATA_DIR/*.txt | awk '{ s += $1 }'\n",
    "environment/one.txt": "1\n2\n",
    "environment/two.txt": "39\n",
    "solution/solve.sh": '#!/bin/bash\nsed -i "s/s += .1 /& } END { print s/" /app/bin/total\n',
    "tests/test.sh": (
        "#!/bin/bash\napt-get update && apt-get install -y curl\n"
        "curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh\n"
        "source $HOME/.local/bin/env\n"
        'if [ "$PWD" = "/" ]; then\n  echo "No WORKDIR"; exit 1\nfi\n'
        "uv venv .tbench-testing\nsource .tbench-testing/bin/activate\nuv pip install pytest==8.4.1\n"
        f"uv run pytest /tests/test_outputs.py -rA\n{REWARD}"
    ),
    "tests/test_outputs.py": (
        "import os, subprocess\n\n\ndef test_total():\n"
        "    assert os.getcwd() == '/app' and os.environ['MODE'] == 'strict'\n"
        "    assert subprocess.run(['total'], capture_output=True, text=True).stdout == '42\\n'\n\n\n"
        "def test_other_numbers(tmp_path):\n    (tmp_path / 'n.txt').write_text('5\\n6\\n')\n"
        "    env = {**os.environ, 'DATA_DIR': str(tmp_path)}\n"
        "    done = subprocess.run(['/app/bin/total'], capture_output=True, text=True, env=env)\n"
        "    assert done.stdout == '11\\n'\n"
    ),
}

PLAIN_PYTEST = {
    "task.toml": TOML,
    "instruction.md": "Write /app/greet.py with a function greet(name) that returns 'Hello, NAME!'.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "solution/solve.sh": "printf 'def greet(name):\\n    return f\"Hello, {name}!\"\\n' > /app/greet.py\n",
    "tests/test.sh": (
        f"pip install pytest==8.3.4 requests --break-system-packages\npython3 -m pytest /tests/test_it.py\n{REWARD}"
    ),
    "tests/test_it.py": "from greet import greet\n\n\ndef test_it():\n    assert greet('Ada') == 'Hello, Ada!'\n",
}

STYLES = {"errors-by-hour": ERRORS_BY_HOUR, "broken-script": BROKEN_SCRIPT, "plain-pytest": PLAIN_PYTEST}


def write(root: Path, style: Mapping[str, str] = ERRORS_BY_HOUR, **changed: str) -> Path:
    """Write a task; ``changed`` replaces files by name."""
    return write_task(root, {**style, **changed})
