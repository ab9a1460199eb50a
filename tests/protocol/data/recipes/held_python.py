"""Second recording, Python programs: heredocs, libraries below the last own frame, chains, pools, arguments."""

from __future__ import annotations

from .held_tests import led
from .model import WHOLE, Recipe, Site

HOOKED = {
    "scripts/hooked.py": "import json\n\n\ndef build(pairs):\n"
    "    return {key: int(value) for key, value in pairs}\n\n\n"
    'def main():\n    print(json.loads(\'{"a": "x1"}\', object_pairs_hook=build))\n\n\nmain()\n',
    "scripts/pool.py": "from concurrent.futures import ProcessPoolExecutor\n\n\ndef work(n):\n    return 10 // n\n\n\n"
    "if __name__ == '__main__':\n    with ProcessPoolExecutor(2) as pool:\n"
    "        print(list(pool.map(work, [2, 0])))\n",
    "scripts/handled.py": "import sys\n\nsys.path.insert(0, '.')\nfrom ledger.models import Ledger\n\n\n"
    "def run():\n    ledger = Ledger()\n    try:\n        ledger.post('cash;1;01.02.2024')\n    except KeyError:\n"
    "        ledger.open('cash')\n        ledger.post('cash;-1;01.02.2024')\n\n\nrun()\n",
    "scripts/jobs.py": "import asyncio\n\n\nasync def step(n):\n    await asyncio.sleep(0)\n    if n == 2:\n"
    "        raise ConnectionResetError('peer gone')\n    return n\n\n\nasync def main():\n"
    "    print(await asyncio.gather(*(step(n) for n in range(4))))\n\n\nasyncio.run(main())\n",
    "scripts/latin.py": "from pathlib import Path\n\nPath('/tmp/latin.txt').write_bytes(b'caf\\xe9')\n"
    "print(Path('/tmp/latin.txt').read_text(encoding='utf-8'))\n",
    "scripts/keys.py": "import subprocess\nimport sys\n\n"
    "subprocess.run([sys.executable, '-c', 'print(1)'], check=True)\n"
    "subprocess.run(['sh', '-c', 'exit 4'], check=True)\n",
    "scripts/verify.py": "import sys\n\nprint('rows.txt: 2 problems')\n"
    "print('verify: failed', file=sys.stderr)\nsys.exit(2)\n",
    "scripts/lock.py": "import os\n\nTARGET = '/etc/ledger.lock'\n\nos.open(TARGET, os.O_CREAT | os.O_WRONLY)\n",
    "scripts/settings.py": "from configparser import ConfigParser\n\nparser = ConfigParser()\n"
    "parser.read('setup.cfg')\n"
    "print(parser['tool:ledger']['name'])\n",
    "scripts/loop.py": "def down(n):\n    return down(n + 1)\n\n\ndown(0)\n",
    "scripts/sync.py": "import sys\n\nimport requests\n\nresponse = requests.get(sys.argv[1], timeout=2)\n"
    "print(response.text)\n",
}

RECIPES: list[Recipe] = [
    led(
        "python3 - <<'EOF'\nfrom ledger.models import Account\n\ndef move(a, b, n):\n    a.withdraw(n)\n"
        "    b.depsit(n)\n\nmove(Account('a', 9), Account('b'), 3)\nEOF",
        "runtime_error",
        Site("b.depsit(n)", file="<stdin>", line=5),
    ),
    led(
        "cd /testbed\npython3 <<'PY'\nimport sys\nsys.path.insert(0, '.')\nfrom ledger.models import Ledger\n"
        "book = Ledger()\nbook.open('cash')\nfor line in ('cash;1;01.02.2024', 'cash;two;01.02.2024'):\n"
        "    book.post(line)\nPY",
        "runtime_error",
        Site(file="ledger/parsing.py", at="raise ParseError"),
    ),
    led(
        "python3 <<-EOF\n\timport math\n\tvalues = [4, -1]\n\tfor v in values: print(math.sqrt(v))\n\tEOF",
        "runtime_error",
        Site("for v in values: print(math.sqrt(v))", file="<stdin>", line=3),
    ),
    led(
        "cat > /testbed/check.py <<'EOF'\nimport json\n\ndata = json.load(open('data/people.json'))\n"
        "for user in data['users']:\n    print(user['email'])\nEOF\npython3 check.py",
        "runtime_error",
        Site(file="check.py", line=5),
        Site("print(user['email'])", file="check.py", line=5),
    ),
    led(
        'python3 -c "\nimport json\nwith open(\\"data/people.json\\") as f:\n    data = json.load(f)\n'
        'print(data[\\"users\\"][2][\\"name\\"])\n"',
        "runtime_error",
        Site('print(data[\\"users\\"][2][\\"name\\"])', file="<string>", line=5),
    ),
    led("python3 -c 'd = {}; d[\"k\"]' 2>&1 | tail -1; exit ${PIPESTATUS[0]}", "runtime_error"),
    led("python3 scripts/hooked.py", "runtime_error", Site(file="scripts/hooked.py", at="int(value)"), files=HOOKED),
    led("python3 scripts/pool.py", "permission_denied", files=HOOKED),  # no semaphores without /dev/shm
    led(
        "python3 scripts/handled.py",
        "runtime_error",
        Site(file="ledger/models.py", at="amount must be positive"),
        files=HOOKED,
    ),
    led(
        "cd scripts && python3 jobs.py 2>&1",
        "runtime_error",
        Site(file="scripts/jobs.py", at="peer gone"),
        Site(file="jobs.py", at="peer gone", where="scripts/jobs.py"),
        files=HOOKED,
    ),
    led(
        "python3 scripts/latin.py", "runtime_error", Site(file="scripts/latin.py", at="encoding='utf-8'"), files=HOOKED
    ),
    led("python3 scripts/keys.py", "runtime_error", Site(file="scripts/keys.py", at="exit 4"), files=HOOKED),
    led("python3 scripts/verify.py --strict", "nonzero_exit", Site(WHOLE), files=HOOKED),
    led("python3 scripts/lock.py", "permission_denied", files=HOOKED),
    led(
        "python3 scripts/settings.py", "runtime_error", Site(file="scripts/settings.py", at="tool:ledger"), files=HOOKED
    ),
    led(
        "python3 scripts/loop.py 2>&1 | tail -n 20; exit ${PIPESTATUS[0]}",
        "runtime_error",
        Site(file="scripts/loop.py", line=2),
        files=HOOKED,
    ),
    led(
        "python3 -c \"from ledger.config import load; load('data/bad.yaml')\"",
        "runtime_error",
        Site(file="ledger/config.py", at="yaml.safe_load"),
    ),
    led(
        "python3 -c \"from ledger.config import rates; print(rates('/testbed/data/rates.yml'))\"",
        "path_not_found",
        Site("/testbed/data/rates.yml"),
    ),
    led("python3 scripts/ratio.py & wait $!", "runtime_error", Site(file="scripts/ratio.py", at="done / total")),
    led(
        "(cd scripts; PYTHONUNBUFFERED=1 python3 ./ratio.py a b)",
        "runtime_error",
        Site(file="scripts/ratio.py", at="done / total"),
        Site(file="ratio.py", at="done / total", where="scripts/ratio.py"),
        Site(file="./ratio.py", at="done / total", where="scripts/ratio.py"),
    ),
    led(
        "printf '1\\n2\\n' | xargs -n1 python3 scripts/ratio.py",
        "runtime_error",
        Site(file="scripts/ratio.py", at="done / total"),
    ),
    led("python3 -m ledger.cli post cash 5", "runtime_error", Site(file="ledger/cli.py", at="accounts[options.name]")),
    led("python3 -m ledger.cli post cash five", "invalid_arguments", Site("five")),
    led("python3 -m ledger.cli list --limit 2 --reverse", "invalid_arguments", Site("--reverse")),
    led("python3 -m ledger.cli post cash 5 --format=xml", "invalid_arguments", Site("--format=xml"), Site("xml")),
    led("python3 -m ledger.cli export", "invalid_arguments", Site("export")),
    led("python3 ledger/cli.py list", "import_error", Site(file="ledger/cli.py", at="from .models")),
    led(
        "python3 -m pyflakes ledger/report.py && python3 -c 'import ledger.report'",
        "import_error",
        Site(file="ledger/report.py", at="from tabulate"),
        setup="sed -i '/import json/d' ledger/report.py",
    ),
    led(
        "cd / && python3 /testbed/scripts/hooked.py && python3 -c 'import ledger'",
        "runtime_error",
        Site(file="scripts/hooked.py", at="int(value)"),
        files=HOOKED,
    ),
    led("python3 -m ledger.export.csv --all", "import_error"),
    led(
        "python3 - <<'EOF'\nimport sys\n\nfrom ledger import parsing\nfrom ledger.storage import Store\n\n"
        "print(Store)\nEOF",
        "import_error",
        Site("from ledger.storage import Store", file="<stdin>", line=4),
    ),
    led("python3 -c 'import ledger.legacy' 2>&1", "syntax_error", Site(file="ledger/legacy.py", line=6)),
    led(
        "python3 -m compileall ledger/ | grep -v Listing; exit ${PIPESTATUS[0]}",
        "syntax_error",
        Site(file="ledger/legacy.py", line=6),
    ),
    led(
        "python3 <<'EOF'\nclass A:\n    def f(self):\n        x = 1\n       return x\nprint(A().f())\nEOF",
        "syntax_error",
        Site("return x", file="<stdin>", line=4),
    ),
    led(
        "python3 -c \"d = {'a': 1}; print(f'{d['a']}')\"",
        "syntax_error",
        Site("d = {'a': 1}; print(f'{d['a']}')", file="<string>", line=1),
    ),
    led('python3 -c "import os,signal; os.kill(os.getpid(), signal.SIGTERM)"', "runtime_error"),
    led("python3 -m venv /opt/env", "permission_denied", Site("/opt/env")),
    led(
        "python3 scripts/sync.py https://api.example.net/v2/rates",
        "policy_violation",
        Site("https://api.example.net/v2/rates"),
        Site("api.example.net"),
        files=HOOKED,
    ),
    led(
        "python3 -m pip install --user --break-system-packages --retries 0 -r requirements.txt",
        "nonzero_exit",  # the lines about the network are not shown
        also=("policy_violation",),
        setup="echo 'tabulate==0.9.0' > requirements.txt",
    ),
    led(
        "python3 -m pip install --break-system-packages -r requirements-dev.txt",
        "path_not_found",
        Site("requirements-dev.txt"),
    ),
    led("python3 scripts/ratio.py < data/rows.csv", "path_not_found", Site("data/rows.csv")),
    # nothing to mark
    led("python3 scripts/ratio.py 2>&1 | tee out.log", None),
    led(
        "python3 -c \"import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); print('ok')\"",
        None,
    ),
    led(
        "python3 - <<'EOF'\nimport subprocess\n\n"
        "r = subprocess.run('nosuchtool', shell=True, capture_output=True, text=True)\n"
        "print(r.returncode, r.stderr)\nEOF",
        None,
    ),
    led(
        "python3 -c \"\nclass A:\n    def __del__(self):\n        raise ValueError('late')\nA()\nprint('done')\n\"",
        None,
    ),
]
