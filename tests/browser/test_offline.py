"""A server with pages starts, and shows them, without asking any host for anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading

asked = []

def note(event, arguments):
    if event == "socket.getaddrinfo" or event == "socket.connect" and isinstance(arguments[1], tuple):
        asked.append(arguments[0] if event == "socket.getaddrinfo" else arguments[1][0])

sys.addaudithook(note)
from fastapi.testclient import TestClient
from tests.browser import applications

with TestClient(applications.ours()) as client:
    page = client.get("/web/").text
    assert client.post("/web/reset").json()["observation"]["balance"] == 0
for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
        thread.join(timeout=60)
print(sorted(set(map(str, asked))), "fonts.googleapis.com" in page, 'rel="icon"' in page)
"""


def test_pages_are_made_and_shown_without_asking_any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADIO_ANALYTICS_ENABLED", raising=False)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "ENABLE_WEB_INTERFACE": "true"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().splitlines()[-1] == "[] False True"
