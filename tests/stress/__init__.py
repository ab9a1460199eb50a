"""A machine that is busy with something else, for the rounds of ``make test-stress``."""
