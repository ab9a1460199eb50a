from openenv.core.env_server.types import Action, Observation


class GreetingAction(Action):
    name: str


class GreetingObservation(Observation):
    greeting: str = ""
