"""Runs inside a sandbox: unpacks a source archive without its top directory.

unpack.py ARCHIVE DIRECTORY
"""

import os
import shutil
import stat
import sys
import tarfile
import zipfile


def main():
    archive, directory = sys.argv[1:]
    stage = directory.rstrip("/") + "/.errata-unpacked"
    os.mkdir(stage)
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                place = opened.extract(info, stage)
                mode = info.external_attr >> 16
                if not info.is_dir() and mode & stat.S_IXUSR:
                    os.chmod(place, 0o755)
    else:
        with tarfile.open(archive) as opened:
            opened.extractall(stage)
    root = stage
    names = os.listdir(stage)
    if len(names) == 1 and os.path.isdir(os.path.join(stage, names[0])):
        root = os.path.join(stage, names[0])
    os.chmod(root, 0o755)
    for name in os.listdir(root):
        os.rename(os.path.join(root, name), os.path.join(directory, name))
    shutil.rmtree(stage)


main()
