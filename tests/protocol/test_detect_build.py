"""The detectors on compilers, build tools and builds of container images: the kind, and the first place they name."""

# ruff: noqa: E501  (a table row is one case; wrapped rows cannot be compared by eye)

from __future__ import annotations

import pytest

from errata_protocol.detect import detect
from errata_protocol.markers import Detection


def find(command: str, stdout: str, stderr: str = "") -> Detection:
    return detect(command, 1, stdout, stderr, cwd="/workspace")


def place(found: Detection) -> tuple[str | None, str | None, int | None]:
    site = found.error_site
    return found.error_kind, site.file if site else None, site.line if site else None


GRADLE = "\nFAILURE: Build failed with an exception.\n\n* What went wrong:\nExecution failed for task ':compile'.\n"
GRADLE_INDENTED = f"""{GRADLE}> Compilation failed; see the compiler output below.
  /workspace/app/src/main/java/org/shop/Cart.java:14: error: cannot find symbol
  import org.shop.tax.Rates;
                     ^
    symbol:   class Rates
  1 error

* Try:
> Check your code and dependencies to fix the compilation error(s)
"""
GRADLE_SCRIPT = """
* Where:
Build file '/workspace/shop/build.gradle' line: 12

* What went wrong:
Could not compile build file '/workspace/shop/build.gradle'.
> startup failed:
  build file '/workspace/shop/build.gradle': 12: unexpected token: } @ line 12, column 1.

  1 error
"""
MIX = """\
    warning: variable "old" is unused
    │
  3 │     old = 1
    │     ~~~
    │
    └─ lib/shop/cart.ex:3:5: Shop.Cart.add/1

    error: undefined variable "total"
    │
  8 │     total
    │     ^^^^^
    │
    └─ lib/shop/cart.ex:8:5: Shop.Cart.add/1

== Compilation error in file lib/shop/cart.ex ==
** (CompileError) lib/shop/cart.ex: cannot compile module Shop.Cart (errors have been logged)
"""
MIX_RAISED = """\
== Compilation error in file lib/shop.ex ==
** (RuntimeError) cannot read prices.csv: no such file or directory
    (elixir 1.16.0) lib/file.ex:385: File.read!/1
    lib/shop.ex:5: (module)
"""
TERRAFORM = """\
╷
│ Warning: Unable to open CLI configuration file
│
│ The CLI configuration file at "/root/.terraformrc" does not exist.
╵
╷
│ Error: Unsupported block type
│
│   on network.tf line 3:
│    3: resorce "x" "y" {
│
╵
"""

# command, output, file, line
ERRORS = [
    ("gradle assemble", "e: file:///workspace/shop/build.gradle.kts:71:3: Unresolved reference 'mode'.\n" + GRADLE, "shop/build.gradle.kts", 71),
    ("./gradlew compileKotlin", "e: /workspace/src/main/kotlin/Cart.kt: (38, 40): Unresolved reference: sum\n" + GRADLE, "src/main/kotlin/Cart.kt", 38),
    ("./gradlew compileKotlin", "w: file:///workspace/src/A.kt:3:4 unused\ne: file:///workspace/src/Cart.kt:38:40 Unresolved reference: sum\n" + GRADLE, "src/Cart.kt", 38),
    ("./gradlew build", GRADLE_INDENTED, "app/src/main/java/org/shop/Cart.java", 14),
    ("./gradlew build", GRADLE + GRADLE_SCRIPT, "shop/build.gradle", 12),
    ("./gradlew build", f"startup failed:\n/workspace/src/main/groovy/A.groovy: 12: unable to resolve class Foo\n{GRADLE}", "src/main/groovy/A.groovy", 12),
    ("./gradlew assembleDebug", f"C/C++: /workspace/app/src/main/cpp/a.cpp:3:5: error: no member named 'x'\n{GRADLE}", "app/src/main/cpp/a.cpp", 3),
    ("mvn compile", "[ERROR] /workspace/src/Cart.kt: (38, 40) Unresolved reference: sum\n[ERROR] -> [Help 1]\n", "src/Cart.kt", 38),
    ("mix compile", "== Compilation error in file lib/shop.ex ==\n** (CompileError) lib/shop.ex:12: undefined function total/1\n", "lib/shop.ex", 12),
    ("mix compile", MIX, "lib/shop/cart.ex", 8),
    ("mix compile", MIX_RAISED, "lib/shop.ex", 5),
    ("rebar3 compile", "===> Compiling src/shop.erl failed\nsrc/shop.erl:12:5: function total/0 undefined\n", "src/shop.erl", 12),
    ("deno check main.ts", "Check file:///workspace/main.ts\nTS2304 [ERROR]: Cannot find name 'cart'.\nconst c = cart();\n          ~~~~\n    at file:///workspace/main.ts:6:11\n\nerror: Type checking failed.\n", "main.ts", 6),
    ("sbt compile", "[error] /workspace/src/main/scala/Cart.scala:3:5: not found: value sum\n[error]     sum()\n[error] one error found\n", "src/main/scala/Cart.scala", 3),
    ("sbt compile", "[error] -- [E006] Not Found Error: /workspace/src/main/scala/Cart.scala:3:4 ----\n[error] one error found\n", "src/main/scala/Cart.scala", 3),
    ("mvn compile", "[ERROR] /workspace/src/main/scala/Cart.scala:3: error: not found: value sum\n[ERROR] one error found\n", "src/main/scala/Cart.scala", 3),
    ("dune build", 'File "bin/main.ml", line 3, characters 4-7:\n3 |     sum\n        ^^^\nError: Unbound value sum\n', "bin/main.ml", 3),
    ("gleam build", "error: Unknown variable\n  ┌─ /workspace/src/cart.gleam:3:5\n  │\n3 │     sum\n  │     ^^^\n", "src/cart.gleam", 3),
    ("nim c a.nim", "/workspace/a.nim(3, 5) Error: undeclared identifier: 'x'\n", "a.nim", 3),
    ("crystal build a.cr", "In a.cr:3:5\n\n 3 | sum\n     ^--\nError: undefined local variable or method 'sum'\n", "a.cr", 3),
    ("dart analyze", "  error • lib/main.dart:3:5 • Undefined name 'x'. • undefined_identifier\n", "lib/main.dart", 3),
    ("gfortran a.f90", "a.f90:3:5:\n\n    3 |  x = 1\n      |  1\nError: Symbol 'x' at (1) has no IMPLICIT type\n", "a.f90", 3),
    ("npx esbuild src/a.ts", '✘ [ERROR] Could not resolve "./x"\n\n    src/a.ts:4:15:\n      4 │ import x from "./x"\n', "src/a.ts", 4),
    ("npx next build", "Failed to compile.\n\n./src/a.tsx:3:7\nType error: Type 'x' is not assignable\n", "src/a.tsx", 3),
    ("npx webpack", "ERROR in ./src/a.js 3:0-21\nModule not found: Error: Can't resolve './x'\n", "src/a.js", 3),
    ("npx vite build", 'error during build:\nsrc/a.ts (3:9): "x" is not exported by "src/b.ts".\n', "src/a.ts", 3),
    ("cargo build", "error[E0433]: failed to resolve: use of undeclared crate or module `shop`\n --> src/main.rs:2:5\n", "src/main.rs", 2),
    ("terraform validate", TERRAFORM, "network.tf", 3),
    ("terraform validate -no-color", TERRAFORM.replace("│ ", "").replace("│", "").replace("╷", "").replace("╵", ""), "network.tf", 3),
]  # fmt: skip


@pytest.mark.parametrize(("command", "text", "file", "line"), ERRORS)
def test_a_compilers_error_gives_its_place(command: str, text: str, file: str, line: int) -> None:
    for found in (find(command, "", text), find(command, text)):
        assert place(found) == ("build_error", file, line)


def test_a_warning_is_not_the_error_beside_it() -> None:
    warning, error = TERRAFORM.split("╷\n")[1:]
    other = error.replace("Unsupported block type", "No configuration files").replace("on network.tf line 3:", "none")
    for text in (f"╷\n{warning}╷\n{other}", f"╷\n{other}╷\n{warning}"):
        assert find("terraform plan", "", text).error_kind == "nonzero_exit"


def image_build(instruction: str, output: str, *, file: str = "Dockerfile") -> str:
    """Return what BuildKit prints when an instruction in line 9 of a Dockerfile fails."""
    own = "".join(f"#11 2.25 {line}".rstrip() + "\n" for line in output.splitlines())
    ended = f'process "/bin/sh -c {instruction}" did not complete successfully: exit code: 1'
    section = f"------\n > [4/6] RUN {instruction}:\n{own.replace('#11 ', '')}------\n{file}:9\n{'-' * 20}\n"
    code = f"   8 |     COPY . .\n   9 | >>> RUN {instruction}\n  10 |     \n{'-' * 20}\n"
    head = f"#11 [4/6] RUN {instruction}\n{own}#11 ERROR: {ended}\n"
    return f"{head}{section}{code}ERROR: failed to solve: {ended}\n"


RUSTC = "error[E0432]: unresolved import `crate::tax::Rate`\n  --> crates/shop/src/cart.rs:40:5\n   |\n40 |     tax::Rate,\n   |     ^^^^\n\nerror: could not compile `shop` (lib) due to 1 previous error\n"
NO_FILE = "npm ERR! code ENOENT\nnpm ERR! enoent ENOENT: no such file or directory, open '/app/package.json'\n"
GO_TEST = "--- FAIL: TestAdd (0.00s)\n    add_test.go:7: got 3\nFAIL\nFAIL\texample\t0.002s\nFAIL\n"
CLASSIC = "The command '/bin/sh -c npm ci' returned a non-zero code: 1\n"

# command, output, kind, file, line
IMAGE_BUILDS = [
    ("docker build -f web.dockerfile .", image_build("cargo build", RUSTC, file="web.dockerfile"), "build_error", "crates/shop/src/cart.rs", 40),
    ("docker build -t web .", image_build("apt-get install -y curl unzipp", "E: Unable to locate package unzipp\n"), "build_error", "Dockerfile", 9),
    ("docker compose build", image_build("npm ci", NO_FILE), "build_error", "Dockerfile", 9),
    ("make image", image_build("npm ci", NO_FILE), "build_error", "Dockerfile", 9),
    ("docker buildx build .", image_build("vite build", "sh: 1: vite: not found\n"), "build_error", "Dockerfile", 9),
    ("docker build .", image_build("gcc -c a.c", "/app/a.c:3:5: error: x\n"), "build_error", "Dockerfile", 9),
    ("docker build .", image_build("gcc -c a.c", "src/a.c:3:5: error: x\n"), "build_error", "src/a.c", 3),
    ("docker build .", image_build("go test ./...", GO_TEST), "test_failure", "add_test.go", 7),
    ("docker build .", f"npm ERR! code EUSAGE\n{CLASSIC}", "build_error", None, None),
    ("docker-compose build", f"src/a.c:3:5: error: x\nERROR: Service 'web' failed to build : {CLASSIC}", "build_error", "src/a.c", 3),
    ("podman build .", 'STEP 2/3: RUN make\nsrc/a.c:3:5: error: x\nError: building at STEP "RUN make": while running runtime: exit status 2\n', "build_error", "src/a.c", 3),
    ("docker build .", f"Dockerfile:3\n{'-' * 20}\n   3 | >>> RUNN pip\n{'-' * 20}\nERROR: failed to solve: dockerfile parse error on line 3: unknown instruction: RUNN\n", "syntax_error", "Dockerfile", 3),
    ("docker build -f no.dockerfile .", "ERROR: failed to solve: failed to read dockerfile: open no.dockerfile: no such file or directory\n", "path_not_found", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("command", "stderr", "kind", "file", "line"), IMAGE_BUILDS)
def test_the_failed_build_of_an_image_gives_the_file_or_the_instruction(
    command: str, stderr: str, kind: str, file: str | None, line: int | None
) -> None:
    assert place(find(command, "", stderr)) == (kind, file, line)


def test_the_classic_builder_prints_what_a_compiler_says_on_standard_output() -> None:
    output = "Step 2/3 : RUN go build ./...\n# example.com/shop\n./main.go:4:2: undefined: x\n"
    assert place(find("docker build .", output, CLASSIC)) == ("build_error", "main.go", 4)


# command, standard error, file, line
IMPORTS = [
    ("bundle exec rake -T", "rake aborted!\nLoadError: cannot load such file -- minitest\n/workspace/rake/tests.rake:4:in `require'\n/workspace/rake/tests.rake:4:in `<top (required)>'\n", "rake/tests.rake", 4),
    ("bundle exec rake", "rake aborted!\nLoadError: cannot load such file -- x\n/workspace/vendor/bundle/ruby/3.2.0/gems/a-1/a.rb:2:in `require'\n/workspace/Rakefile:4:in `<top (required)>'\n", "Rakefile", 4),
    ("bundle exec rspec", "An error occurred while loading ./spec/a_spec.rb.\nLoadError:\n  cannot load such file -- nope\n# ./spec/a_spec.rb:3:in `require'\n", "spec/a_spec.rb", 3),
    ("lua a.lua", "lua: a.lua:5: module 'nope' not found:\n\tno file '/usr/share/lua/5.3/nope.lua'\n", "a.lua", 5),
    ("deno run main.ts", 'error: Module not found "file:///workspace/x.ts".\n    at file:///workspace/main.ts:2:20\n', "main.ts", 2),
    ("npx jest", "FAIL src/a.test.js\n  ● Test suite failed to run\n\n    Cannot find module './x' from 'src/a.test.js'\n\n      at R._throw (node_modules/jest-resolve/r.js:4:1)\n      at Object.require (src/a.test.js:3:11)\n\nTest Suites: 1 failed, 1 total\n", "src/a.test.js", 3),
]  # fmt: skip


@pytest.mark.parametrize(("command", "stderr", "file", "line"), IMPORTS)
def test_the_importing_line_is_in_the_frames_below_the_message(command: str, stderr: str, file: str, line: int) -> None:
    assert place(find(command, "", stderr)) == ("import_error", file, line)


def test_another_error_of_rake_has_its_line() -> None:
    text = "rake aborted!\n{}\n/workspace/Rakefile:3:in `block'\n/usr/local/bundle/gems/rake/exe/rake:27:in `<main>'\n"
    assert place(find("rake x", "", text.format("NameError: undefined method `x'"))) == ("runtime_error", "Rakefile", 3)
    missing = text.format("Errno::ENOENT: No such file or directory @ rb_sysopen - a.csv")
    assert place(find("rake x", "", missing)) == ("path_not_found", "Rakefile", 3)


PARSES = [
    ("mix compile", "** (SyntaxError) invalid syntax found on lib/shop.ex:5:3:\n    error: syntax error before: ')'\n", "lib/shop.ex", 5),
    ("mix compile", "** (TokenMissingError) lib/shop.ex:9:1: missing terminator: end\n", "lib/shop.ex", 9),
    ("deno run a.ts", "error: The module's source code could not be parsed: Expected ';' at file:///workspace/a.ts:3:5\n", "a.ts", 3),
    ("perl x.pl", "Unmatched ( in regex; marked by <-- HERE in m/( <-- HERE a/ at x.pl line 3.\n", "x.pl", 3),
]  # fmt: skip


@pytest.mark.parametrize(("command", "stderr", "file", "line"), PARSES)
def test_code_that_does_not_parse_has_its_place(command: str, stderr: str, file: str, line: int) -> None:
    assert place(find(command, "", stderr)) == ("syntax_error", file, line)
