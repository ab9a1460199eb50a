"""The server side: environment, tasks, verification. Nothing here is imported by clients."""
