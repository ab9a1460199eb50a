"""Interprets the small part of Bash that the fake sandbox understands, deterministically.

Commands: ``echo printf cat cd pwd export unset env true false : exit sleep mkdir rm ls test [``, assignments,
``$NAME``, ``$?``, ``$((...))``, ``$(...)``, both kinds of quotes, ``;``, ``&&``, ``||``, newlines, ``> >> < 2>&1``.
Anything else is ``command not found`` or a syntax error, worded as by bash. Tests of the server use it instead of real
processes.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field

Files = dict[str, bytes | None]
"""Absolute path to content; None is a directory."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=", re.DOTALL)
_OPERATORS = ("&&", "||", "2>&1", ">>", ">", "<", ";", "\n")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "0": "\0", "r": "\r", "e": "\x1b"}
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class _Exit(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class TimedOut(Exception):
    """Virtual time passed the command's timeout."""


class _SyntaxError(Exception):
    def __init__(self, message: str, line: int) -> None:
        self.message = message
        self.line = line


@dataclass(frozen=True, slots=True)
class _Token:
    text: str  # raw text of a word, with quotes; or an operator
    line: int
    is_operator: bool = False


@dataclass(slots=True)
class FakeShell:
    """One shell over an in-memory tree.

    Args:
        files: The tree, changed in place.
        cwd: Absolute working directory.
        env: Exported variables.
        timeout_s: Virtual seconds after which `TimedOut` is raised; only ``sleep`` passes virtual time.
        stdin: Content of standard input.
    """

    files: Files
    cwd: str
    env: dict[str, str]
    timeout_s: float
    stdin: bytes = b""
    variables: dict[str, str] = field(default_factory=dict)
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    clock_s: float = 0.0
    status: int = 0
    line: int = 1

    def run(self, command: str) -> int:
        """Run ``command`` and return its exit status; output is in ``stdout`` and ``stderr``.

        Raises:
            TimedOut: ``timeout_s`` virtual seconds passed.
        """
        try:
            self._list(_tokens(command))
        except _Exit as stop:
            self.status = stop.status
        except _SyntaxError as bad:
            self._complain(bad.line, bad.message)
            self.status = 2
        return self.status

    def _complain(self, line: int, text: str) -> None:
        self.stderr += f"/bin/bash: line {line}: {text}\n".encode()

    def _list(self, tokens: list[_Token]) -> None:
        """Run the simple commands of a list as ``&&``, ``||`` and ``;`` demand."""
        simple: list[_Token] = []
        wanted = True
        for token in [*tokens, _Token(";", 0, True)]:
            if not token.is_operator or token.text in (">", ">>", "<", "2>&1"):
                simple.append(token)
                continue
            if not simple and token.text in ("&&", "||", ";") and token.line:
                raise _SyntaxError(f"syntax error near unexpected token `{token.text}'", token.line)
            if simple and wanted:
                self._simple(simple)
            simple = []
            wanted = {"&&": self.status == 0, "||": self.status != 0}.get(token.text, True)

    def _simple(self, tokens: list[_Token]) -> None:
        """Run one simple command with its redirections and assignments."""
        words: list[str] = []
        line = tokens[0].line
        target: tuple[str, str] | None = None
        stdin, merge = self.stdin, False
        pending = list(tokens)
        while pending:
            token = pending.pop(0)
            if token.is_operator and token.text == "2>&1":
                merge = True
            elif token.is_operator:
                if not pending or pending[0].is_operator:
                    raise _SyntaxError("syntax error near unexpected token `newline'", token.line)
                path = self._word(pending.pop(0))
                if token.text != "<":
                    target = (token.text, path)
                elif isinstance(content := self.files.get(self._path(path)), bytes):
                    stdin = content
                else:
                    self._complain(line, f"{path}: No such file or directory")
                    self.status = 1
                    return
            else:
                words.append(self._word(token))
        if target is not None and (problem := self._redirection_problem(target[1])):
            self._complain(line, f"{target[1]}: {problem}")
            self.status = 1
            return
        raw = next((t.text for t in tokens if not t.is_operator), "")
        while words and _ASSIGNMENT.match(raw) and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            (self.env if name in self.env else self.variables)[name] = value
            self.status = 0
            raw = words[0] if words else ""
        out, err = bytearray(), bytearray()
        if words:
            self.status = self._builtin(words, stdin, out, err, line)
        if merge:
            out, err = out + err, bytearray()
        if target is not None:
            path = self._path(target[1])
            before = self.files.get(path) if target[0] == ">>" else b""
            self.files[path] = (before or b"") + bytes(out)
        else:
            self.stdout += out
        self.stderr += err

    def _redirection_problem(self, path: str) -> str:
        """Return why a file cannot be written, worded as by bash; "" if it can."""
        full = self._path(path)
        if full in self.files and self.files[full] is None:
            return "Is a directory"
        parent = posixpath.dirname(full)
        if parent not in self.files:
            return "No such file or directory"
        return "" if self.files[parent] is None else "Not a directory"

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.cwd, path))

    def _builtin(self, words: list[str], stdin: bytes, out: bytearray, err: bytearray, line: int) -> int:
        """Call the method that implements a command; unknown ones are ``command not found``, status 127."""
        name, args = words[0], words[1:]
        method = {":": "true", "[": "test", "printenv": "env"}.get(name, name)
        found = getattr(self, f"_do_{method}", None)
        if found is None:
            missing = "No such file or directory" if "/" in name else "command not found"
            err += f"/bin/bash: line {line}: {name}: {missing}\n".encode()
            return 127
        self.line = line
        result: int = found(args, stdin, out, err)
        return result

    # Each command takes (arguments, stdin, stdout, stderr) and returns its status.

    def _do_true(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        return 0

    def _do_false(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        return 1

    def _do_exit(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        raise _Exit(int(args[0]) & 255 if args else self.status)

    def _do_echo(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        end = "\n"
        if args[:1] == ["-n"]:
            args, end = args[1:], ""
        out += (" ".join(args) + end).encode("utf-8", "surrogateescape")
        return 0

    def _do_printf(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        text = re.sub(r"\\(x[0-9a-fA-F]{1,2}|.)", _unescape, args[0] if args else "")
        values = iter(args[1:])
        text = re.sub(r"%[sd%]", lambda m: "%" if m[0] == "%%" else next(values, ""), text)
        out += text.encode("utf-8", "surrogateescape")
        return 0

    def _do_cat(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        status = 0
        for arg in args or ["-"]:
            path = self._path(arg)
            content = stdin if arg == "-" else self.files.get(path)
            if content is not None:
                out += content
                continue
            problem = "Is a directory" if path in self.files else "No such file or directory"
            err += f"cat: {arg}: {problem}\n".encode()
            status = 1
        return status

    def _do_cd(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        path = self._path(args[0] if args else self.env.get("HOME", "/"))
        if self.files.get(path, b"") is not None:
            problem = "Not a directory" if path in self.files else "No such file or directory"
            err += f"/bin/bash: line {self.line}: cd: {args[0]}: {problem}\n".encode()
            return 1
        self.cwd = path
        self.env["PWD"] = path
        return 0

    def _do_pwd(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        out += f"{self.cwd}\n".encode()
        return 0

    def _do_export(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        for arg in args:
            name, equals, value = arg.partition("=")
            self.env[name] = value if equals else self.variables.pop(name, "")
        return 0

    def _do_unset(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        for arg in args:
            self.env.pop(arg, None)
            self.variables.pop(arg, None)
        return 0

    def _do_env(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        out += "".join(f"{k}={v}\n" for k, v in self.env.items()).encode()
        return 0

    def _do_sleep(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        self.clock_s += float(args[0])
        if self.clock_s > self.timeout_s:
            raise TimedOut
        return 0

    def _do_mkdir(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        for arg in (a for a in args if a != "-p"):
            path = self._path(arg)
            if "-p" in args:
                self.make_parents(path + "/x")
            elif path in self.files:
                err += f"mkdir: cannot create directory ‘{arg}’: File exists\n".encode()
                return 1
            elif posixpath.dirname(path) not in self.files:
                err += f"mkdir: cannot create directory ‘{arg}’: No such file or directory\n".encode()
                return 1
            else:
                self.files[path] = None
        return 0

    def _do_rm(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        flags = "".join(a for a in args if a.startswith("-"))
        for arg in (a for a in args if not a.startswith("-")):
            path = self._path(arg)
            if path not in self.files:
                if "f" not in flags:
                    err += f"rm: cannot remove '{arg}': No such file or directory\n".encode()
                    return 1
            elif self.files[path] is None and "r" not in flags:
                err += f"rm: cannot remove '{arg}': Is a directory\n".encode()
                return 1
            for name in [n for n in self.files if n == path or n.startswith(path + "/")]:
                del self.files[name]
        return 0

    def _do_ls(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        where = self._path(args[0] if args else ".")
        if where not in self.files:
            err += f"ls: cannot access '{args[0]}': No such file or directory\n".encode()
            return 2
        names = sorted(posixpath.basename(n) for n in self.files if posixpath.dirname(n) == where and n != "/")
        out += "".join(f"{n}\n" for n in names).encode("utf-8", "surrogateescape")
        return 0

    def _do_test(self, args: list[str], stdin: bytes, out: bytearray, err: bytearray) -> int:
        args = args[:-1] if args[-1:] == ["]"] else args
        if len(args) == 2 and args[0] in ("-f", "-d", "-e"):
            path = self._path(args[1])
            kind = "-d" if path in self.files and self.files[path] is None else "-f"
            return 0 if path in self.files and args[0] in ("-e", kind) else 1
        if len(args) == 3 and args[1] in ("=", "!="):
            return 0 if (args[0] == args[2]) == (args[1] == "=") else 1
        return 0 if len(args) == 1 and args[0] else 1

    def make_parents(self, path: str) -> None:
        """Create the directories above ``path``."""
        parent = posixpath.dirname(path)
        while parent not in self.files:
            self.files[parent] = None
            parent = posixpath.dirname(parent)

    def _word(self, token: _Token) -> str:
        """Expand quotes, variables, arithmetic and command substitution. No splitting, no globbing."""
        text, out, at, quoted = token.text, "", 0, False
        while at < len(text):
            char = text[at]
            if char == "'" and not quoted:
                end = text.index("'", at + 1)
                out, at = out + text[at + 1 : end], end + 1
            elif char == '"':
                quoted, at = not quoted, at + 1
            elif char == "\\" and at + 1 < len(text) and (not quoted or text[at + 1] in '"\\$`'):
                out, at = out + text[at + 1], at + 2
            elif text.startswith("$((", at):
                end = text.index("))", at)
                out, at = out + str(self._arithmetic(text[at + 3 : end])), end + 2
            elif text.startswith("$(", at):
                end = _closing(text, at + 1)
                out, at = out + self._substitute(text[at + 2 : end]), end + 1
            elif text.startswith("$?", at):
                out, at = out + str(self.status), at + 2
            elif char == "$" and (name := _NAME.match(text, at + 1)):
                out, at = out + self._variable(name[0]), name.end()
            else:
                out, at = out + char, at + 1
        return out

    def _variable(self, name: str) -> str:
        return self.variables.get(name, self.env.get(name, ""))

    def _substitute(self, command: str) -> str:
        """Run a command substitution in a copy of this shell; return its output without trailing newlines."""
        inner = FakeShell(
            self.files,
            self.cwd,
            dict(self.env),
            self.timeout_s,
            self.stdin,
            dict(self.variables),
            clock_s=self.clock_s,
            status=self.status,
        )
        self.status = inner.run(command)
        self.clock_s = inner.clock_s
        self.stderr += inner.stderr
        return inner.stdout.decode("utf-8", "surrogateescape").rstrip("\n")

    def _arithmetic(self, text: str) -> int:
        """Expand variables in an arithmetic expression and return its value."""
        text = re.sub(r"\$?([A-Za-z_]\w*)", lambda m: self._variable(m[1]) or "0", text).replace("/", "//")
        try:
            return _evaluate(ast.parse(text.strip() or "0", mode="eval").body)
        except (SyntaxError, KeyError, AttributeError, ValueError, ZeroDivisionError) as error:
            raise _SyntaxError(f"{text}: syntax error in expression", 1) from error


def _evaluate(node: ast.expr) -> int:
    """Return the value of an arithmetic expression of integers; KeyError, AttributeError or ValueError for others."""
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand)
    return int(node.value)  # type: ignore[attr-defined]


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code.startswith("x"):
        return bytes([int(code[1:], 16)]).decode("utf-8", "surrogateescape")
    return _ESCAPES.get(code, "\\" + code)


def _closing(text: str, at: int) -> int:
    """Return the index of the parenthesis that closes the one at ``at``."""
    depth = 0
    for index in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise _SyntaxError("unexpected EOF while looking for matching `)'", 1)


def _word_end(text: str, at: int, line: int) -> int:
    """Return where the word that starts at ``at`` ends; quotes and ``$(...)`` are skipped whole."""
    quote = ""
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif text.startswith("$(", at):
            at = _closing(text, at + 1)
        elif char in " \t\n;<>|&()":
            break
        at += 1
    if quote:
        raise _SyntaxError(f"unexpected EOF while looking for matching `{quote}'", line)
    return at


def _tokens(text: str) -> list[_Token]:
    """Split a command into words and operators, without comments; raise `_SyntaxError` for a word without an end."""
    tokens: list[_Token] = []
    at, line = 0, 1
    while at < len(text):
        if text[at] in " \t":
            at += 1
            continue
        if text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        found = next((op for op in _OPERATORS if text.startswith(op, at)), None)
        if found:
            tokens.append(_Token(found, line, True))
            line += found == "\n"
            at += len(found)
            continue
        end = _word_end(text, at, line)
        if end == at:
            raise _SyntaxError(f"syntax error near unexpected token `{text[at]}'", line)
        tokens.append(_Token(text[at:end], line))
        line += text.count("\n", at, end)
        at = end
    return tokens
