"""Commands that want a network where there is none."""

from __future__ import annotations

from .model import Recipe, Site, row

RECIPES: list[Recipe] = [
    row(
        "curl -fsSL https://get.example.org/install.sh | bash; exit ${PIPESTATUS[0]}",
        "policy_violation",
        Site("https://get.example.org/install.sh"),
        Site("get.example.org"),
    ),
    row(
        "wget -q -O data.csv http://data.example.net/rows.csv",
        "nonzero_exit",
        Site("wget -q -O data.csv http://data.example.net/rows.csv"),
        also=("policy_violation",),
        ambiguous=True,
    ),
    row(
        "wget http://data.example.net/rows.csv",
        "policy_violation",
        Site("http://data.example.net/rows.csv"),
        Site("data.example.net"),
    ),
    row("pip install tabulate", "nonzero_exit", Site("pip install tabulate")),
    row(
        "pip install --break-system-packages --retries 0 tabulate",
        "policy_violation",
        Site("tabulate"),
        Site("pip install --break-system-packages --retries 0 tabulate"),
        also=("nonzero_exit",),
    ),
    row(
        "python3 -m venv venv && venv/bin/pip install --retries 0 -q httpx",
        "nonzero_exit",
        also=("policy_violation",),
        ambiguous=True,
    ),  # -q hides that the cause is the network
    row(
        "git clone -q https://example.com/org/project.git /tmp/project",
        "policy_violation",
        Site("https://example.com/org/project.git"),
        Site("example.com"),
    ),
    row(
        "git fetch upstream",
        "policy_violation",
        tree="repo",
        cwd="/testbed",
        setup="git remote add upstream https://example.com/org/up.git",
    ),
    row(
        "ssh -o BatchMode=yes deploy@prod.example.com uptime",
        "policy_violation",
        Site("deploy@prod.example.com"),
        Site("prod.example.com"),
    ),
    row(
        "scp notes.txt deploy@10.1.2.3:/srv/",
        "policy_violation",
        Site("deploy@10.1.2.3:/srv/"),
        Site("10.1.2.3"),
        Site("deploy@10.1.2.3"),
    ),
    row(
        "python3 -c \"import socket; socket.create_connection(('8.8.8.8', 53), 3)\"",
        "policy_violation",
        Site("8.8.8.8"),
        Site("'8.8.8.8'"),
    ),
    row(
        "python3 -c \"import requests; print(requests.get('https://api.example.com/v1', timeout=3))\"",
        "policy_violation",
        Site("https://api.example.com/v1"),
        Site("api.example.com"),
    ),
    row(
        "python3 fetch.py",
        "policy_violation",
        files={
            "fetch.py": "import urllib.request\n\nwith urllib.request.urlopen('https://example.com') as reply:\n"
            "    print(reply.status)\n"
        },
    ),
    row(
        "node -e \"fetch('https://example.com').then(r => console.log(r.status))\"",
        "policy_violation",
        Site("https://example.com"),
        Site("example.com"),
        tree="web",
    ),
    row(
        "curl -sS -m 3 http://10.20.30.40:8080/health",
        "policy_violation",
        Site("http://10.20.30.40:8080/health"),
        Site("10.20.30.40"),
        Site("10.20.30.40:8080"),
    ),
    row("ping -c 1 1.1.1.1", "policy_violation", Site("1.1.1.1")),
    row("echo > /dev/tcp/example.com/443", "policy_violation", Site("example.com"), Site("/dev/tcp/example.com/443")),
    row(
        "rsync -a mirror.example.org::pub/ /tmp/pub/",
        "policy_violation",
        Site("mirror.example.org"),
        Site("mirror.example.org::pub/"),
    ),
    row("curl -sS http://127.0.0.1:8000/", "nonzero_exit", Site("curl -sS http://127.0.0.1:8000/")),
    row(
        "python3 -c \"import socket; socket.create_connection(('127.0.0.1', 5432))\"",
        "runtime_error",
        Site("import socket; socket.create_connection(('127.0.0.1', 5432))", file="<string>", line=1),
    ),
    row("curl -s https://example.com -o page.html || echo 'download failed, going on'", None),
    row(
        "python3 -m pytest -q tests/test_net.py",
        "policy_violation",
        files={
            "tests/test_net.py": "import urllib.request\n\n\ndef test_page():\n"
            "    urllib.request.urlopen('http://example.com')\n"
        },
        also=("test_failure",),
    ),
    row(
        "git ls-remote https://example.com/org/project.git HEAD",
        "policy_violation",
        Site("https://example.com/org/project.git"),
        Site("example.com"),
    ),
    row(
        "git clone git@example.com:org/project.git",
        "policy_violation",
        Site("git@example.com:org/project.git"),
        Site("example.com"),
        Site("git@example.com"),
    ),
    row(
        "curl -s https://example.com/data.json",
        "nonzero_exit",
        Site("curl -s https://example.com/data.json"),
        also=("policy_violation",),
        ambiguous=True,
    ),
    row(
        "curl -sS https://example.com/data.json | jq .items; exit ${PIPESTATUS[0]}",
        "policy_violation",
        Site("https://example.com/data.json"),
        Site("example.com"),
    ),
    row(
        "python3 -c \"import socket; print(socket.gethostbyname('db.internal'))\"",
        "policy_violation",
        Site("db.internal"),
        Site("'db.internal'"),
    ),
    row(
        "python3 <<'EOF'\nimport urllib.request\n\nURL = 'https://example.org/schema.json'\n"
        "print(urllib.request.urlopen(URL, timeout=3).read())\nEOF",
        "policy_violation",
        Site("https://example.org/schema.json"),
        Site("example.org"),
    ),
    row(
        "ruby -rnet/http -e 'puts Net::HTTP.get(URI(\"http://example.com/\"))'",
        "policy_violation",
        Site("http://example.com/"),
        Site("example.com"),
    ),
    row(
        'perl -MIO::Socket::INET -e \'IO::Socket::INET->new("192.0.2.7:80") or die "connect: $!"\'',
        "policy_violation",
        Site("192.0.2.7:80"),
        Site("192.0.2.7"),
    ),
    row(
        "node -e \"require('net').connect(443, '203.0.113.9')\"",
        "policy_violation",
        Site("203.0.113.9"),
        Site("'203.0.113.9'"),
        tree="web",
    ),
    row("gem install rake-x", "policy_violation", Site("rake-x"), Site("gem install rake-x"), also=("nonzero_exit",)),
    row(
        "python3 -m pip download -q --retries 0 attrs==23.1.0 -d wheels",
        "nonzero_exit",
        also=("policy_violation",),
        ambiguous=True,
    ),
    row("wget -qO- http://127.0.0.1:9999/ || curl -sS http://127.0.0.1:9999/", "nonzero_exit"),
    row(
        "python3 -c \"import requests; requests.get('http://localhost:8000/health')\"",
        "runtime_error",
        Site("import requests; requests.get('http://localhost:8000/health')", file="<string>", line=1),
    ),
    row(
        "timeout 3 bash -c 'cat < /dev/tcp/198.51.100.4/22'",
        "policy_violation",
        Site("198.51.100.4"),
        Site("/dev/tcp/198.51.100.4/22"),
    ),
]
