"""Episodes of a student: the tools of an environment as a server tells them, and the session in which they are called."""
