"""Checks of a client: a program that is driven by JSON lines against a server that cuts, refuses, repeats and extends.

The program gets the base URL of the server as its last argument. It reads requests from standard input, a JSON object
a line, and prints one JSON object a line for each answer, in the order of the requests of a session::

    {"session": "a", "type": "reset", "data": {}}
    {"session": "a", "type": "step", "data": {"n": 2}}
    {"session": "a", "type": "state", "data": {"t": 1}}
    {"session": "a", "type": "fork", "data": {"t": 1, "child": "b"}}
    {"session": "a", "type": "close"}

An answer is ``{"session": "a", "type": "observation", "data": {...}}`` with the data that the client took. Other types
are ``state_at``, ``forked``, ``closed``, and ``error`` with ``{"code", "message"}``. The program ends when its standard
input does. The kit needs its extra ``sample`` for this.
"""
