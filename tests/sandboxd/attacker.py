"""`Attacker`: arbitrary code that has the broker's socket."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path
from typing import Any


class Attacker:
    """Sends any bytes to a broker's socket.

    Args:
        path: The socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def connected(self) -> socket.socket:
        """Return a connection."""
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(120)
        link.connect(str(self._path))
        return link

    def raw(self, sent: bytes) -> list[dict[str, Any]]:
        """Return the lines that come back."""
        with self.connected() as link:
            link.sendall(sent)
            return [json.loads(line) for line in link.makefile("rb")]

    def call(self, do: str, *, data: bytes = b"", **arguments: Any) -> dict[str, Any]:
        """Return the last line of an answer, with the output of a program as ``output``."""
        sent = json.dumps({"do": do, **arguments}).encode() + b"\n"
        if do in ("exec", "copy_in"):
            for at in range(0, max(len(data), 1), 1 << 19):
                sent += json.dumps({"data": base64.b64encode(data[at : at + (1 << 19)]).decode()}).encode() + b"\n"
            sent += b'{"end": true}\n'
        lines = self.raw(sent)
        output = b"".join(base64.b64decode(text) for line in lines for text in line.values() if isinstance(text, str))
        return {**lines[-1], "output": output}

    def ok(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer of a request that has to succeed."""
        answer = self.call(do, **arguments)
        assert "ok" in answer, answer
        return answer["ok"]

    def code(self, do: str, **arguments: Any) -> str:
        """Return the error code of a request that has to be refused."""
        answer = self.call(do, **arguments)
        assert "error" in answer, answer
        return str(answer["error"]["code"])

    def shell(self, container: str, text: str, **arguments: Any) -> str:
        """Run a program of bash in a container, and return what it printed."""
        answer = self.call("exec", container=container, argv=["/bin/bash", "-c", text], timeout_s=30, **arguments)
        assert "ok" in answer, answer
        return answer["output"].decode()
