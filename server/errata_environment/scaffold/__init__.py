"""``errata init NAME --sandboxed``: writes an environment of one's own, which needs this kit and no change of it.

The files it writes are in ``templates``; words between ``@`` signs in them are replaced.
"""
