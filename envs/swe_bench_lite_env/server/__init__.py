"""The server side: environment, preparation, grading. Nothing here is imported by clients."""
