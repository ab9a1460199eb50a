"""Replaces the installers that ``test.sh`` calls: apt-get, curl, wget, pip, uv, uvx, sudo, git.

A sandbox has no network. What these would fetch is there already (`recipe.VERIFIER_PACKAGES`, the base tree), or it is
missing, which is reported (`lacks`) and never the agent's failure. Calls that need no network go to the real program.
"""

import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lacks import report

PACKAGES = os.environ.get("ERRATA_VERIFIER_PACKAGES", "/usr/lib/errata-verifier")
BIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DIST_PACKAGES = "/usr/lib/python3/dist-packages"
STOOD_FOR = {"curl", "wget", "ca-certificates", "python3-pip", "python3-venv", "pipx", "uv", "sudo", "git", "pip"}
"""Debian packages whose programs are here."""
LOCAL = re.compile(r"(?:\w+://)?(?:[^/@]*@)?(?:localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|\[::1?\]|::1)(?:[:/?#]|$)")
REMOTE = re.compile(r"(?:https?|ftp|ssh|git)://|git@[\w.-]+:")


def say(text):
    print(text, file=sys.stderr)


def missing(name, text):
    """Report a missing tool, print an error and return the exit status of a command that is not found."""
    report("tool", name, text)
    say(f"{text}: there is no network, and the base tree does not have it")
    return 1


def real(name):
    """Return the program of the same name that comes next on PATH, or None."""
    return shutil.which(name, path=SYSTEM_PATH)


# Debian packages


def apt(name, arguments):
    words = options_out(arguments, {"-o", "-t", "-c"})
    if not words or words[0] not in ("install", "reinstall", "build-dep"):
        return 0
    lacking = [word for word in words[1:] if not installed(word)]
    if lacking:
        return missing(" ".join(lacking), f"{name} install {' '.join(lacking)}: not in the base tree") and 100
    return 0


def options_out(arguments, with_value):
    words, skip = [], False
    for word in arguments:
        if skip:
            skip = False
        elif word in with_value:
            skip = True
        elif not word.startswith("-"):
            words.append(word)
    return words


def installed(package):
    """Say whether a Debian package is installed, or something here does its work."""
    package = re.split("[=/:]", package)[0]
    if package in STOOD_FOR:
        return True
    lists = "/var/lib/dpkg/info"
    if any(os.path.exists(f"{lists}/{package}{suffix}.list") for suffix in ("", ":amd64", ":arm64")):
        return True
    return package in ("python3-pytest", "python-is-python3") and real("python3") is not None


# Python packages


def distributions():
    """Return the versions of the Python packages of verifiers and of the system, by normalised name."""
    from importlib.metadata import distributions as found

    places = [DIST_PACKAGES, PACKAGES]
    return {normal(entry.metadata["Name"]): entry.version for entry in found(path=places) if entry.metadata["Name"]}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(requirements):
    """Return those of ``requirements`` (specifiers as for pip) that no installed package satisfies.

    If the version does not match, the package is accepted if its major version is that of every version in the
    requirement (`same_series`), with a note on standard error. Accepted without a package are requirements whose marker
    is false here, and pip, setuptools, wheel and uv. Requirements with a URL or of invalid form are never satisfied.
    Without the package ``packaging`` only names are compared.
    """
    have = distributions()
    sys.path.append(PACKAGES)
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return [text for text in requirements if normal(re.split(r"[<>=!~\[; @]", text)[0]) not in have]
    found = []
    for text in requirements:
        try:
            wanted = Requirement(text.replace("@latest", "").split("#")[0].strip())
        except InvalidRequirement:
            found.append(text)
            continue
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        version = have.get(normal(wanted.name))
        if version is None and normal(wanted.name) in ("pip", "setuptools", "wheel", "uv"):
            continue  # nothing is built here
        if version is None or wanted.url:
            found.append(text)
        elif not wanted.specifier.contains(version, prereleases=True):
            if same_series(wanted, version):
                say(f"{wanted}: {wanted.name} {version} stands for it")
            else:
                found.append(text)
    return found


def same_series(wanted, version):
    """Return whether every version in a requirement has the same major version as the installed ``version``."""
    return all(bound.version.split(".")[0] == version.split(".")[0] for bound in wanted.specifier)


def require(who, requirements):
    """Return 0 where all requirements are here; else report them and return 1."""
    absent = lacking(requirements)
    if absent:
        return missing(" ".join(absent), f"{who}: the base tree has no Python package {', '.join(absent)}")
    return 0


VALUED = {
    *(
        "-i",
        "--index-url",
        "--extra-index-url",
        "--index",
        "--default-index",
        "-f",
        "--find-links",
        "-c",
        "--constraint",
    ),
    *(
        "-t",
        "--target",
        "--prefix",
        "--root",
        "--python",
        "-p",
        "--timeout",
        "--retries",
        "--trusted-host",
        "--project",
    ),
    *("--cache-dir", "--python-version", "--directory", "--python-platform", "--group", "--env-file", "--progress-bar"),
    *(
        "--link-mode",
        "--resolution",
        "--prerelease",
        "--exclude-newer",
        "--refresh-package",
        "--only-binary",
        "--no-binary",
    ),
}


def pip(name, arguments):
    words = options_out([word for word in arguments if "=" not in word or not word.startswith("-")], VALUED)
    if not words or words[0] in ("--version", "cache", "config", "check", "list", "freeze", "debug"):
        print("pip 25.0 (the verifiers' packages)")
        return 0
    if words[0] == "show":
        return 0 if not lacking(words[1:2]) else 1
    if words[0] != "install":
        return missing(f"pip {words[0]}", f"pip {words[0]}")
    requirements, files = [], []
    for at, word in enumerate(arguments):
        if word in ("-r", "--requirement"):
            files += arguments[at + 1 : at + 2]
        elif word.startswith("--requirement="):
            files.append(word.partition("=")[2])
        elif word in ("-e", "--editable") or word.startswith("--editable="):
            return missing("pip install -e", "pip install -e")
    requirements = [word for word in words[1:] if word not in files]
    for file in files:
        try:
            with open(file) as lines:
                rows = [line.split(" #")[0].strip() for line in lines]
        except OSError as error:
            say(f"{name}: {error}")
            return 1
        requirements += [row for row in rows if row and not row.startswith(("#", "-"))]
    return require(f"{name} install", requirements)


# uv


def uv(name, arguments):
    arguments = list(arguments)
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option in ("--version", "-V"):
            print("uv 0.9.5 (the verifiers' packages)")
            return 0
        if option in VALUED and arguments:
            arguments.pop(0)
    if not arguments:
        return 0
    command, rest = arguments[0], arguments[1:]
    if command == "pip":
        return pip("uv pip", rest)
    if command == "venv":
        return venv(rest)
    if command == "run":
        return uv_run(rest)
    if command == "tool" and rest[:1] == ["run"]:
        return uvx("uv tool run", rest[1:])
    if command == "tool" and rest[:1] == ["install"]:
        return require("uv tool install", options_out(rest[1:], VALUED | {"--with", "-w"}))
    if command == "add":
        return require("uv add", options_out(rest, VALUED))
    if command in ("init", "sync", "lock", "python", "cache", "self", "version", "tool"):
        return 0
    return missing(f"uv {command}", f"uv {command}")


def with_packages(arguments):
    """Split off uv's own options; return (packages that --with and --from name, the rest)."""
    packages, rest = [], list(arguments)
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option == "--":
            break
        takes = option in VALUED or option in ("-w", "--with", "--from", "--with-requirements", "--with-editable", "-m")
        if option in ("-m", "--module"):
            rest = ["python3", "-m", *([value] if equals else []), *rest]
            break
        if takes and not equals and rest:
            value = rest.pop(0)
        if option in ("-w", "--with", "--from"):
            packages += value.split(",")
        elif option in ("--with-requirements", "--with-editable"):
            packages.append(value)
    return packages, rest


def uvx(name, arguments):
    packages, rest = with_packages(arguments)
    if not rest:
        return 0
    tool, _, version = rest[0].partition("@")
    tool = tool.partition("==")[0]
    known = {"pytest": "pytest", "py.test": "pytest", "python": "", "python3": ""}
    if "--from" not in " ".join(arguments[: len(arguments) - len(rest)]):
        if tool not in known and real(tool) is None:
            packages.append(tool)
        elif known.get(tool) and (version or "==" in rest[0]) and version != "latest":
            packages.append(rest[0].replace("@", "=="))
    if (code := require(name, packages)) != 0:
        return code
    return start([tool, *rest[1:]])


def uv_run(arguments):
    packages, rest = with_packages(arguments)
    if (code := require("uv run", packages)) != 0:
        return code
    if rest and rest[0].endswith(".py"):
        rest = ["python3", *rest]
    return start(rest) if rest else 0


def start(command):
    """Become a program of a uv environment."""
    if command[0] in ("pytest", "py.test"):
        return becomes([f"{BIN}/pytest", *command[1:]])
    if command[0] in ("python", "python3") or re.fullmatch(r"python3\.\d+", command[0]):
        os.environ["PYTHONPATH"] = ":".join(filter(None, [os.environ.get("PYTHONPATH", ""), PACKAGES]))
        return becomes([real("python3") or "python3", *command[1:]])
    return becomes(command)


def becomes(command):
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        report("command", command[0], f"no program {command[0]!r}")
        return 127


def venv(arguments):
    """Make a virtual environment that has the verifiers' packages, anew where something is there already."""
    names = options_out(arguments, VALUED | {"--prompt"})
    place = names[0] if names else ".venv"
    if os.path.islink(place):
        os.unlink(place)
    shutil.rmtree(place, ignore_errors=True)
    python = real("python3")
    if python is None:
        return missing("python3", "uv venv: no python3")
    code = subprocess.call([python, "-I", "-m", "venv", "--without-pip", "--system-site-packages", place])
    if code != 0:
        return code
    lib = next(entry for entry in os.listdir(f"{place}/lib") if entry.startswith("python3"))
    with open(f"{place}/lib/{lib}/site-packages/errata-verifier.pth", "w") as path:
        path.write(PACKAGES + "\n")
    for program in ("pytest", "py.test", "pip", "pip3"):
        os.symlink(f"{BIN}/{program}", f"{place}/bin/{program}")
    return 0


# The network

INSTALLER = """mkdir -p "$HOME/.local/bin"
printf 'export PATH="$HOME/.local/bin:$PATH"\\n' > "$HOME/.local/bin/env"
"""
"""What stands for the installer of uv: uv is on PATH already."""


def download(name, arguments):
    addresses = [
        word for word in arguments if REMOTE.match(word) or (re.match(r"[\w.-]+\.\w+/", word) and name != "git")
    ]
    remote = [word for word in addresses if not LOCAL.match(word)]
    installers = [
        word for word in remote if re.match(r"https?://(www\.)?astral\.sh/uv/|https?://github\.com/astral-sh/uv/", word)
    ]
    if installers and installers == remote:
        target = None
        for at, word in enumerate(arguments):
            if word in ("-o", "--output", "-O", "--output-document") and not (name == "curl" and word == "-O"):
                target = arguments[at + 1] if at + 1 < len(arguments) else None
            elif name == "wget" and re.fullmatch(r"-q?O-|-O-|-qO", word):
                target = "-" if word.endswith("-") else arguments[at + 1]
        if target in (None, "-"):
            if name == "curl" or target == "-":
                sys.stdout.write(INSTALLER)
                return 0
            target = os.path.basename(installers[0])
        with open(target, "w") as file:
            file.write(INSTALLER)
        return 0
    program = real(name)
    if program is None:
        report("tool", name, f"no program {name!r}")
        say(f"{name}: command not found")
        return 127
    if not remote:
        return becomes_real(program, arguments)
    code = subprocess.call([program, *arguments])
    if code != 0:
        report("tool", remote[0], f"{name} {remote[0]}: there is no network")
    return code


def becomes_real(program, arguments):
    os.execv(program, [os.path.basename(program), *arguments])


def sudo(name, arguments):
    rest = list(arguments)
    while rest and (rest[0].startswith("-") or "=" in rest[0]):
        word = rest.pop(0)
        if word in ("-u", "--user", "-g") and rest:
            rest.pop(0)
        elif "=" in word and not word.startswith("-"):
            key, _, value = word.partition("=")
            os.environ[key] = value
    return becomes(rest) if rest else 0


PROGRAMS = {
    **dict.fromkeys(("apt", "apt-get", "aptitude"), apt),
    **dict.fromkeys(("pip", "pip3"), pip),
    **dict.fromkeys(("curl", "wget", "git"), download),
    **{"uv": uv, "uvx": uvx, "sudo": sudo},
    **{"venv": lambda name, arguments: venv(arguments), "ensurepip": lambda name, arguments: 0},
}


def not_found(name, arguments):
    """Report a command that ``test.sh`` calls and that does not exist; see ``bash_env``."""
    word = arguments[0] if arguments else ""
    report("command", word, f"command not found: {word}")
    return 127


if __name__ == "__main__":
    called = sys.argv[1]
    sys.exit((not_found if called == "not-found" else PROGRAMS[called])(called, sys.argv[2:]))
