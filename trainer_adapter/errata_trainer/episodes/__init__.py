"""Episodes of a student: an environment's tools as its server tells them, and the session in which they are called."""
