"""From the bytes of a file to its text."""


def decode(data):
    """Return the text of a file: UTF-8, or else Windows-1252."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")
