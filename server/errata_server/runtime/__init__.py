"""What environments of one data directory share: journal access, metrics, limits on instances, late rewards, the lock.

One `Runtime` per data directory and process. Imports nothing of sessions or doors: these register callbacks with it.
"""
