from .client import GreetingEnv
from .models import GreetingAction, GreetingObservation

__all__ = ["GreetingAction", "GreetingEnv", "GreetingObservation"]
