"""What environments of one data directory share: journal access and row builders, threads, sandboxes, metrics, limits
on instances, late rewards, readiness, shutdown, and the lock of the directory.

One `Runtime` per data directory and process. Imports nothing of sessions or doors: these register callbacks with it.
"""
