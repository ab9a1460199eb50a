"""The tasks of an environment: OpenEnv's Task API over them, the choice of one at a reset, and tasks as directories."""
