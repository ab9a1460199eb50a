from openenv.core.generic_client import GenericEnvClient


class GreetingEnv(GenericEnvClient):
    pass
