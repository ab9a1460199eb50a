"""All routes of an application."""

from .messages import Response
from .route import Route


class RouteTable:
    """Routes in the order in which they were added; the first that fits answers."""

    def __init__(self):
        self.routes = []

    def add(self, path, answer, methods=("GET",)):
        """Add a route.

        Raises:
            RouteInvalid: Its path or a method cannot be.
        """
        self.routes.append(Route(path, methods, answer))

    def route(self, path, methods=("GET",)):
        """Add the decorated function."""

        def decorate(answer):
            self.add(path, answer, methods)
            return answer

        return decorate

    def handle(self, request):
        """Return the response to a request."""
        for route in self.routes:
            if request.method not in route.methods:
                continue
            variables = route.match(request.path)
            if variables is not None:
                return route.answer(request, **variables)
        return Response(404, "not found")
