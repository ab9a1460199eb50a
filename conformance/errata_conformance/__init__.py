"""Black-box conformance checks of OpenEnv servers and clients against RFC 014, 015 and 016.

Nothing here imports Errata or OpenEnv: a codec that both sides share would hide a misreading that both share.
`server_side` holds a server against the texts, `client_side` a client. `sample` is a small server that follows them,
and can be made to break any statement, so that each check can be seen to fail.
"""
