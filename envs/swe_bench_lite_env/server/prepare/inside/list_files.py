"""Runs inside a sandbox: writes the names of the files and links below a directory, without its repository.

list_files.py DIRECTORY OUTPUT
"""

import json
import os
import sys


def main():
    directory, output = sys.argv[1:]
    names = []
    for here, subdirectories, files in os.walk(directory):
        if here == directory and ".git" in subdirectories:
            subdirectories.remove(".git")
        links = [name for name in subdirectories if os.path.islink(os.path.join(here, name))]
        names += [os.path.relpath(os.path.join(here, name), directory) for name in files + links]
    with open(output, "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(sorted(names), file)


main()
