"""The kit for authors of environments that run commands in sandboxes.

It has what every such environment needs beside its tasks: the base class, the sandbox backend of a session, tools,
the Task API, grading. `published` holds what goes into the half that clients import, without server code.
Nothing here is about one environment, and the server imports none of it.
"""
