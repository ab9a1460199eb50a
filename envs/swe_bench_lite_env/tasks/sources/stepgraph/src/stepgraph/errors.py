"""The errors of this package."""


class StepError(Exception):
    """A graph that has no order."""


class UnknownStep(StepError, LookupError):
    """A step that is needed, or asked for, and was not added."""


class Cycle(StepError):
    """Steps that need each other; `steps` is the circle, its first step at both ends."""

    def __init__(self, steps):
        super().__init__(" -> ".join(steps))
        self.steps = list(steps)
