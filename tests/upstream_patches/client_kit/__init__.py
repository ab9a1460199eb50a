"""A kit that judges a client of the proposals A (No Lost Replies) and C (Repeat-Safe Requests), in any language.

It needs Python 3.11 and `websockets`, and nothing of Errata or OpenEnv. From the root of the repository::

    python -m tests.upstream_patches.client_kit 'node client.js'
    python -m tests.upstream_patches.client_kit 'python client.py' --json

The client is a command, to which the kit appends ``--url http://HOST:PORT --timeout SECONDS --deadline SECONDS``:
``--timeout`` is how long it waits for a reply before it takes it for lost, ``--deadline`` how long it tries to get one
in all. It creates a session by ``POST /mcp``, attaches to it on ``/ws?session_id=``, and closes it at the end.

It reads requests from standard input until that ends, one JSON object a line, and then exits with status 0::

    {"type": "step", "data": {"n": 2}}

``type`` is ``reset``, ``step`` or ``mcp``. For each it prints one line in turn, and flushes it: ``{"type", "data"}`` of
the reply, also where that is an error, or ``{"failed": CODE}`` where it gives up, CODE being that of the refusal, or
DEADLINE. A client without a method for ``mcp`` prints ``{"failed": "NOT_SUPPORTED"}``.
"""
