from openenv.core.env_server.http_server import create_app

try:
    from ..models import GreetingAction, GreetingObservation
    from .greeting_environment import GreetingEnvironment
except ImportError:
    from models import GreetingAction, GreetingObservation
    from server.greeting_environment import GreetingEnvironment

app = create_app(
    GreetingEnvironment, GreetingAction, GreetingObservation, env_name="greeting_env", max_concurrent_envs=2
)
