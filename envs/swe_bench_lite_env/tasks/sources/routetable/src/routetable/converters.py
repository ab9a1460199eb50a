"""What the variables of a path may be."""

import re

CONVERTERS = {
    "int": (re.compile(r"\d+"), int),
    "word": (re.compile(r"[A-Za-z_]+"), str),
    "text": (re.compile(r"[^/]+"), str),
}
