"""Requests and responses."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: str = ""


@dataclass
class Response:
    status: int
    body: str = ""
    headers: dict = field(default_factory=dict)

    def __post_init__(self):
        self.headers.setdefault("Content-Length", str(len(self.body.encode())))
