"""A small server that follows R-014, R-015 and R-016, and can be made to break one of their statements.

``python -m errata_conformance.sample --port 8000`` serves the tally environment in memory; ``--defect NAME`` gives it
that defect (``--list`` names them). Nothing is stored, so its sessions are lost when it ends. It needs the extra
``sample``: starlette and uvicorn.
"""
