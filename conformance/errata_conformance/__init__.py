"""Black-box conformance checks of OpenEnv servers and clients for the statements R-014, R-015 and R-016.

No module imports Errata, because an error in a codec that both sides share would not be seen. Only `graders`, which
OpenEnv loads, imports OpenEnv. `server_side`
checks a server, `client_side` a client. `sample` is a small server that follows the statements, and can be made to
break any of them, to show that each check can fail.
"""
