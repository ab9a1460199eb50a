"""The broker in this process, on an engine that is a list of its requests. `tests/sandbox/docker` has a real one."""
