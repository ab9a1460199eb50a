"""Calls the agent's script as cron does, here and in a copy elsewhere, and prints what it writes."""

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile

HERE = "/workspace/nightly"
ENV = {"HOME": "/", "PATH": "/usr/bin:/bin"}
DATA = {
    "plain": "food,1250\nrent,90000\n\nfood,50\nb,1\nB,2\na b,3\nfood,-5\n",
    "windows": "Zoo visit,800\r\n\r\nfood,10\r\nZoo visit,1\r\n",
    "quotes": "it's,1\n\"x\",2\n$HOME,3\na*,4\n\\n,5\n",
    "no_last_line_end": "a,1\nb,20",
    "large": "a,3000000000\na,3000000000\n",
    "word": "a,1\nb,two\n",
    "fields": "a,1\nb,2,3\n",
    "no_amount": "a,1\nb\n",
}


def call(command, stdin, folder, cwd="/", env=None):
    try:
        done = subprocess.run(
            command, cwd=cwd, env=ENV | (env or {}), input=stdin, capture_output=True, text=True, timeout=10
        )
        return [done.returncode, len(done.stdout), len(done.stderr.splitlines())], reports(folder)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return [type(error).__name__, 0, 0], {}


def reports(folder):
    found = {}
    out = os.path.join(folder, "out")
    names = sorted(os.listdir(out)) if os.path.isdir(out) else []
    for name in [n for n in names if n.startswith("report-")]:
        with open(os.path.join(out, name), errors="backslashreplace") as file:
            found[name] = file.read(2000)
    return found


def copied(name, above="cron "):
    folder = os.path.join(tempfile.mkdtemp(prefix=above), name)
    shutil.copytree(HERE, folder)
    shutil.rmtree(os.path.join(folder, "out"), ignore_errors=True)
    return folder


def with_data(content, report=None, name="nightly", above="cron "):
    folder = copied(name, above)
    if content is not None:
        with open(os.path.join(folder, "data", "2024-02-29.csv"), "w", newline="") as file:
            file.write(content)
    if report is not None:
        os.mkdir(os.path.join(folder, "out"))
        with open(os.path.join(folder, "out", "report-2024-02-29.txt"), "w") as file:
            file.write(report)
    return folder


def clock():
    """Build a library that sets the date of whatever is started with it to $PROBE_TIME."""
    folder = tempfile.mkdtemp(prefix="clock-")
    library = os.path.join(folder, "clock.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=CLOCK, text=True, check=True)
    return library


CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t now(void) { const char *at = getenv("PROBE_TIME"); return at ? atoll(at) : 0; }
time_t time(time_t *to) { if (to) *to = now(); return now(); }
int gettimeofday(struct timeval *to, void *zone) { (void)zone; to->tv_sec = now(); to->tv_usec = 0; return 0; }
int clock_gettime(clockid_t id, struct timespec *to) { (void)id; to->tv_sec = now(); to->tv_nsec = 0; return 0; }
int timespec_get(struct timespec *to, int base) { to->tv_sec = now(); to->tv_nsec = 0; return base; }
"""
DAYS = ["2024-02-29", "2031-11-07"]
"""A date that stands in the crontab itself is right on one day at most."""
RECORDER = """#!/bin/bash
printf '%s\\0' "${{BASH_VERSION:+bash}}" "$@" >> {record}
printf '\\n' >> {record}
"""


def crontab():
    """Run the entry of the crontab as cron does: the shell gets what stands before the first bare %, the rest is stdin."""
    with open(os.path.join(HERE, "crontab")) as file:
        lines = [line.strip("\n") for line in file]
    entries = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    settings = [line for line in entries if "=" in line.split()[0]]
    entries = [line for line in entries if line not in settings]
    if len(entries) != 1:
        return {"entries": len(entries)}
    *when, command = entries[0].split(None, 5)
    shell, stdin, at = "", None, 0
    while at < len(command):
        if command[at : at + 2] == "\\%":
            target, at = "%", at + 2
        elif command[at] == "%":
            target, at = None, at + 1
        else:
            target, at = command[at], at + 1
        if target is None:
            stdin = "" if stdin is None else stdin + "\n"
        elif stdin is None:
            shell += target
        else:
            stdin += target
    record = os.path.join(os.path.dirname(LIBRARY), "record")
    settings = dict(map(str.strip, line.split("=", 1)) for line in settings)
    settings = {name.strip("'\""): value.strip("'\"") for name, value in settings.items()}
    script = os.path.join(HERE, "report.sh")

    def run(day):
        noon = datetime.datetime.fromisoformat(day + "T12:00:00+00:00")
        env = settings | {"LD_PRELOAD": LIBRARY, "PROBE_TIME": str(int(noon.timestamp()))}
        shutil.rmtree(os.path.join(HERE, "out"), ignore_errors=True)
        return call([settings.get("SHELL", "/bin/sh"), "-c", shell], stdin or "", HERE, env=env)

    reports, given = [], []
    for day in DAYS:
        with open(os.path.join(HERE, "data", f"{day}.csv"), "w") as file:
            file.write(f"day,{datetime.date.fromisoformat(day).toordinal()}\n")
        reports.append(run(day))
    with open(script, "w") as file:
        file.write(RECORDER.format(record=record))
    for day in DAYS:
        open(record, "w").close()
        run(day)
        with open(record) as file:
            given.append([line.rstrip("\n").split("\0")[:-1] for line in file])
    return {"entries": 1, "when": when, "given": given, "reports": reports}


def as_author():
    """Call it as its author does: from its directory, in a shell that has REPORT_HOME. So it worked at the start."""
    folder = with_data("food,1\nrent,2\nfood,3\n", report="old\n", above="author-")
    status, found = call(["bash", "report.sh", "2024-02-29"], "", folder, cwd=folder, env={"REPORT_HOME": folder})
    return [status[0], found]


LIBRARY = clock()
out = {"author": as_author()}
for name, content in DATA.items():
    folder = with_data(content, name="night ly")
    out[name] = call(["bash", os.path.join(folder, "report.sh"), "2024-02-29"], "", folder)
folder = with_data(DATA["plain"], report="old\n")
out["again"] = call(["bash", "./report.sh", "2024-02-29"], "", folder, cwd=folder)
for name, content in (("missing", None), ("kept", DATA["word"])):
    folder = with_data(content, report="old\n")
    out[name] = call(["bash", os.path.join(folder, "report.sh"), "2024-02-29"], "", folder)
try:
    out["crontab"] = crontab()
except (OSError, ValueError, IndexError) as error:
    out["crontab"] = {"entries": type(error).__name__}
json.dump(out, sys.stdout)
