"""A small server that follows RFC 014, 015 and 016, and can be made to break one statement of them.

``python -m errata_conformance.sample --port 8000`` serves the tally environment in memory; ``--defect NAME`` makes a
wrong server of it (``--list`` names them). Nothing is stored, so its sessions are lost when it ends. It needs the extra
``sample``: starlette and uvicorn.
"""
