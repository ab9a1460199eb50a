"""A fleet of ``errata serve`` processes on a Ray cluster: actors supervise them, and a registry knows where they are.

Ray is imported here only, and by nothing else of Errata (extra ``fleet``).
"""
