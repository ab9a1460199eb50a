"""What the programs of Errata need of the operating system: supervised threads, the limit of open files and how a
server divides it, files that others made, restarts of processes, the user's cache, and plugins of other distributions.

Journal and sandbox import this package and the protocol and nothing else of ours, and so can stores and backends of
other distributions. What needs a journal, a sandbox, a session or a setting does not belong here.
"""
