"""One server process: uvicorn with our socket protocols, binding, signals, drain and shutdown."""
