"""Commands that run out of time or of something else."""

from __future__ import annotations

from .model import WHOLE, Recipe, Site, row

RECIPES: list[Recipe] = [
    row("python3 -c 'import time; time.sleep(60)'", "timeout", Site(WHOLE), limit_s=2),
    row("tail -f server.log", "timeout", Site(WHOLE), limit_s=2),
    row("cd shop && python3 -m http.server 8000", "timeout", Site(WHOLE), limit_s=2),
    row(
        "python3 -m pytest -q tests/test_slow.py",
        "timeout",
        Site(WHOLE),
        limit_s=3,
        files={"tests/test_slow.py": "import time\n\n\ndef test_waits():\n    time.sleep(60)\n"},
    ),
    row("for i in 1 2 3; do echo try $i; sleep 20; done", "timeout", Site(WHOLE), limit_s=2),
    row("timeout 1 python3 -m http.server 8000", "timeout", Site(WHOLE)),
    row("timeout 0.5s bash -c 'while :; do sleep 0.1; done'; exit $?", "timeout", Site(WHOLE)),
    row("timeout --signal=KILL 1 tail -f notes.txt", "timeout", Site(WHOLE)),
    row("cd /workspace && timeout 1 sleep 5 && echo finished", "timeout", Site(WHOLE)),
    row("read -t 1 answer < <(sleep 3); exit 124", "timeout", Site(WHOLE), also=("nonzero_exit",), ambiguous=True),
    row("ulimit -v 200000; python3 -c \"x = 'a' * 10**9\"", "resource_limit", Site(WHOLE)),
    row(
        "ulimit -v 300000; python3 load_all.py",
        "resource_limit",
        Site(WHOLE),
        files={"load_all.py": "rows = []\nwhile True:\n    rows.append(bytearray(10**6))\n"},
    ),
    row(
        "node --max-old-space-size=16 grow.js",
        "resource_limit",
        Site(WHOLE),
        tree="web",
        files={"grow.js": "const kept = [];\nfor (;;) kept.push(new Array(1000).fill({ a: 1 }));\n"},
    ),
    row("head -c 80M /dev/zero > /tmp/big.bin", "resource_limit", Site(WHOLE)),
    row("cp /dev/zero /tmp/fill", "resource_limit", Site(WHOLE)),
    row("python3 -c \"open('/tmp/f', 'wb').write(b'0' * (90 << 20))\"", "resource_limit", Site(WHOLE)),
    row("echo data > /dev/full", "resource_limit", Site(WHOLE)),
    row(
        "ulimit -f 20; python3 -c \"open('out.bin', 'wb').write(b'0' * 10**6)\"",
        "resource_limit",
        Site(WHOLE),
        also=("runtime_error",),
    ),
    row(
        "ulimit -n 16 && python3 opener.py",
        "resource_limit",
        Site(WHOLE),
        files={"opener.py": "import tempfile\n\nkept = [tempfile.TemporaryFile() for _ in range(64)]\n"},
    ),
    row("ulimit -u 30; for i in $(seq 60); do sleep 3 & done; wait", None),
    row("ulimit -t 1; awk 'BEGIN { while (1) n++ }'", "resource_limit", Site(WHOLE)),
    row("bash -c 'kill -KILL $$'", "resource_limit", Site(WHOLE)),
    row('python3 -c "import signal, os; os.kill(os.getpid(), signal.SIGXCPU)"', "resource_limit", Site(WHOLE)),
    row(
        "ulimit -s 256; gcc deep.c -o /tmp/deep && /tmp/deep",
        "runtime_error",
        tree="none",
        files={
            "deep.c": "int down(int n) { volatile char pad[4096]; pad[0] = n; return down(n + 1) + pad[0]; }\n"
            "int main(void) { return down(0); }\n"
        },
        also=("resource_limit",),
        ambiguous=True,
    ),
    row(
        "python3 -m pytest -q tests/test_memory.py",
        "test_failure",
        Site(file="tests/test_memory.py", at="bytearray", test="tests/test_memory.py::test_big"),
        files={"tests/test_memory.py": "def test_big():\n    assert bytearray(10**15)\n"},
        also=("resource_limit",),
        ambiguous=True,
    ),
    row("while ! curl -sf http://127.0.0.1:8000/ > /dev/null; do sleep 0.5; done", "timeout", Site(WHOLE), limit_s=2),
    row("sleep infinity & wait", "timeout", Site(WHOLE), limit_s=2),
    row("node -e 'setInterval(() => console.log(\"tick\"), 500)'", "timeout", Site(WHOLE), tree="web", limit_s=2),
    row(
        "make slow 2>&1 | tail -3",
        "timeout",
        Site(WHOLE),
        tree="none",
        limit_s=2,
        files={"Makefile": "slow:\n\t@echo starting\n\t@sleep 60\n"},
    ),
    row(
        "timeout 2 python3 -m pytest -q -s tests/test_slow.py",
        "timeout",
        Site(WHOLE),
        files={
            "tests/test_slow.py": "import time\n\n\ndef test_waits():\n    print('Error: still waiting')\n"
            "    time.sleep(60)\n"
        },
    ),
    row("timeout -s INT 1 sleep 30", "timeout", Site(WHOLE)),
    row(
        "timeout -k 1 1 bash -c 'trap \"\" TERM; while :; do sleep 0.2; done'",
        "resource_limit",
        Site(WHOLE),
        also=("timeout",),
        ambiguous=True,
    ),
    row("timeout 1 yes | tail -1; exit ${PIPESTATUS[0]}", "timeout", Site(WHOLE)),
    row('python3 -c "x = [0] * 10**14"', "resource_limit", Site(WHOLE)),
    row("dd if=/dev/zero of=/tmp/disk.img bs=1M count=100", "resource_limit", Site(WHOLE)),
    row("seq 1 20000000 > /tmp/numbers && sort /tmp/numbers | head -1", "resource_limit", Site(WHOLE)),
    row(
        "tar cf /tmp/a.tar shop && cp -r /usr/lib/python3 /tmp/ 2>&1 | tail -2; exit ${PIPESTATUS[0]}",
        "resource_limit",
        Site(WHOLE),
    ),
    row("ulimit -f 1; seq 1 100000 > numbers.txt", "resource_limit", Site(WHOLE)),
    row(
        "node -e 'const a = []; for (;;) a.push(Buffer.alloc(1e6).toString())' --max-old-space-size=8",
        "resource_limit",
        Site(WHOLE),
        tree="web",
        setup="true",
        limit_s=4,
    ),
    row("node -e 'Buffer.alloc(1e13)'", "runtime_error", tree="web"),
    row("ulimit -v 150000; gcc -O2 -Iinclude -c src/main.c -o /tmp/m.o; node -v", None, tree="c"),
]
