"""Checks of a client, a program that is driven by JSON lines.

The server that it talks to cuts connections, refuses and repeats messages, and sends unknown fields. The program gets
the base URL of that server as its last argument. It reads requests from standard input, one JSON object a line, and
prints one JSON object a line for each answer, in the order of the requests of a session::

    {"session": "a", "type": "reset", "data": {}}
    {"session": "a", "type": "step", "data": {"n": 2}}
    {"session": "a", "type": "state", "data": {"t": 1}}
    {"session": "a", "type": "fork", "data": {"t": 1, "child": "b"}}
    {"session": "a", "type": "close"}

An answer is ``{"session": "a", "type": "observation", "data": {...}}`` with the data that the client received. The
other types are ``state_at``, ``forked``, ``closed``, and ``error`` with ``{"code", "message"}``; the code NOT_SUPPORTED
says that the client does not offer what it was asked for. After ``fork`` the child is a session of the name ``child``.
The program exits at the end of its standard input. The kit needs its extra ``sample`` for this."""
