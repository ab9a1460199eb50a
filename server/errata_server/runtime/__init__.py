"""What all environments of one data directory share: journal, threads, sandboxes, metrics, capacity, late rewards.

One `Runtime` per data directory and process. Knows nothing of sessions or sockets.
"""
