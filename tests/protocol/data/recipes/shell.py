"""Mistakes in bash itself, in sed, awk and their friends, and programs that are not there."""

from __future__ import annotations

from .model import Recipe, Site, row

DEPLOY = {
    "deploy.sh": '#!/bin/bash\nset -euo pipefail\necho building\ntarget=${TARGET_DIR}\necho "to $target"\n',
    "steps.sh": "#!/bin/bash\nset -e\necho one\nterraform plan\necho two\n",
    "broken.sh": "#!/bin/bash\nif [ -f notes.txt ]; then\n  echo yes\nelse\n  echo no\n",
    "quote.sh": "#!/bin/bash\necho one\necho 'it's two'\n",
    "crlf.sh": "#!/bin/bash\r\necho hi\r\n",
    "interp.py": "#!/opt/python/bin/python3\nprint(1)\n",
}

RECIPES: list[Recipe] = [
    # not there
    row("python -m pytest tests", "command_not_found", Site("python")),
    row("cd shop && nodemon cart.py", "command_not_found", Site("nodemon")),
    row("black --check shop/ 2>&1", "command_not_found", Site("black")),
    row("cargo build --release && ./target/release/app", "command_not_found", Site("cargo")),
    row("ls *.py | xargs -n1 pylint", "command_not_found", Site("pylint"), setup="touch a.py"),
    row("env FOO=1 uvicorn app:app", "command_not_found", Site("uvicorn")),
    row("timeout 5 htop -n 1", "command_not_found", Site("htop")),
    row("nohup redis-server", "command_not_found", Site("redis-server")),
    row("sudo apt-get update", "command_not_found", Site("sudo")),
    row("./deploy.py --dry-run", "command_not_found", Site("./deploy.py")),
    row("bash steps.sh", "command_not_found", files=DEPLOY),
    row("make_dataset() { dvc pull; }\nmake_dataset", "command_not_found", Site("dvc")),
    row("for f in notes.txt README.md; do bat $f; done", "command_not_found", Site("bat")),
    row("echo 'SELECT 1' | psql -h localhost", "command_not_found", Site("psql")),
    row("./crlf.sh", "command_not_found", Site("./crlf.sh"), files=DEPLOY),
    row("./interp.py", "command_not_found", Site("./interp.py"), files=DEPLOY),
    row("Export PATH=$PATH:/opt/bin", "command_not_found", Site("Export")),
    row("x = 5", "command_not_found", Site(("x", 0))),
    row("$(cat notes.txt | head -1)", "command_not_found"),
    # bash does not compile it
    row("while read line; do echo $line; < notes.txt", "syntax_error"),
    row("if [ -f notes.txt ] then echo yes; fi", "syntax_error"),
    row("echo $(( 1 + ))", "syntax_error"),
    row("case $1 in\n  a) echo a\n  b) echo b;;\nesac", "syntax_error"),
    row("cat > out.py << EOF\nprint('hello)\nEOF\necho 'done", "syntax_error"),
    row("echo done)", "syntax_error"),
    row("bash broken.sh", "syntax_error", Site(file="broken.sh", line=6), files=DEPLOY),
    row(
        "./quote.sh 2>&1", "syntax_error", Site(file="./quote.sh", line=3), Site(file="quote.sh", line=3), files=DEPLOY
    ),
    row("bash -n broken.sh && echo ok", "syntax_error", Site(file="broken.sh", line=6), files=DEPLOY),
    row("sh -c 'arr=(1 2 3); echo ${arr[0]}'", "syntax_error"),
    row("sed -i 's/alpha/a/b/c/' notes.txt", "syntax_error", also=("invalid_arguments",)),
    row("sed -i 's/shop/cart' README.md", "syntax_error"),
    row("sed -e '/start/,/end/{d' notes.txt", "syntax_error"),
    row(
        "sed 's|/usr|/opt|' -i notes.txt && sed -i \"s/path/$HOME/\" notes.txt",
        "syntax_error",
        also=("invalid_arguments",),
    ),
    row("awk -F, '{ if ($1 > 2 { print } }' notes.txt", "syntax_error"),
    row(
        "perl -ne 'print if /(alpha/' notes.txt",
        "syntax_error",
        also=("runtime_error", "invalid_arguments"),
        ambiguous=True,
    ),
    row("echo '1 +' | bc -q; echo '(1' | bc", None),
    # bash stops while it runs
    row("./deploy.sh", "runtime_error", Site(file="./deploy.sh", line=4), Site(file="deploy.sh", line=4), files=DEPLOY),
    row('set -u; echo "$UNDEFINED_NAME/bin"', "runtime_error"),
    row("echo ${CONFIG:?must be set}", "runtime_error", also=("nonzero_exit",)),
    row("readonly N=1; N=2; echo never", "runtime_error", also=("nonzero_exit",)),
    row("echo $((10 / 0))", "runtime_error", also=("nonzero_exit",)),
    row("cd shop && { echo start; kill -TERM $$; }", "runtime_error"),
    row(
        "set -e\necho step one\n(exit 9)\necho step two",
        "nonzero_exit",
        Site("set -e\necho step one\n(exit 9)\necho step two"),
    ),
    row("python3 -m pytest -q && exit 2", "nonzero_exit", Site("python3 -m pytest -q && exit 2"), Site("exit 2")),
    row(
        "test -f shop/cart.py && grep -q retries shop/cart.py || { echo 'no retries' >&2; exit 1; }",
        "nonzero_exit",
        Site("test -f shop/cart.py && grep -q retries shop/cart.py || { echo 'no retries' >&2; exit 1; }"),
        Site("exit 1"),
    ),
    row("return 3", "nonzero_exit", Site("return 3"), also=("runtime_error", "syntax_error"), ambiguous=True),
    row("flake8 -j1 shop", "nonzero_exit", Site("flake8 -j1 shop"), setup="echo 'import os' >> shop/cart.py"),
    row("python3 -m pip show torch", "nonzero_exit", Site("python3 -m pip show torch")),
    row("set -o pipefail; seq 1 1000000 | head -1", None, also=("runtime_error", "nonzero_exit"), ambiguous=True),
    row("shellcheck deploy.sh", None, files=DEPLOY),
]
