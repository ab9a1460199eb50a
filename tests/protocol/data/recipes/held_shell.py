"""Second recording, shell and tools: scripts, variables in paths, sed and friends, git, network, other languages."""

from __future__ import annotations

from .held_tests import led
from .model import WHOLE, Recipe, Site

PATCH = """git apply --check - <<'EOF'
--- a/poem.txt
+++ b/poem.txt
@@ -2,3 +2,3 @@
 two
-drei
+3
 four
EOF"""
MAILS = "git format-patch -q -1 topic -o /tmp/mails 2>/dev/null; "
BIG = {"big.rb": "data = Array.new(3)\ndata.each_with_index do |value, i|\n  puts Integer(value || 'n/a')\nend\n"}


def tool(
    command: str,
    kind: str | None,
    *sites: Site,
    setup: str = "",
    limit_s: float = 30,
    also: tuple[str, ...] = (),
    files: dict[str, str] | None = None,
) -> Recipe:
    """Build a recipe of the tools tree."""
    return led(
        command, kind, *sites, tree="tools", setup=setup, limit_s=limit_s, also=also, files=files, cwd="/workspace"
    )


def git(command: str, kind: str | None, *sites: Site, setup: str = "", also: tuple[str, ...] = ()) -> Recipe:
    """Build a recipe of the repository of poems."""
    return led(command, kind, *sites, tree="poems", setup=setup, also=also)


RECIPES: list[Recipe] = [
    # scripts
    tool("bash scripts/release.sh", "runtime_error", Site(file="scripts/release.sh", at="channel $CHANNEL")),
    tool("bash -x scripts/pack.sh", "path_not_found"),
    tool("sh scripts/fetch.sh", "command_not_found"),
    tool(
        "bash scripts/walk.sh 2>&1 | head -3; exit ${PIPESTATUS[0]}",
        "syntax_error",
        Site(file="scripts/walk.sh", line=6),
    ),
    tool("scripts/env.rb", "command_not_found"),
    tool("bash -euo pipefail -c 'echo start; echo \"$RELEASE_TAG\"'", "runtime_error"),
    tool(
        "cat > /tmp/job.sh <<'EOF'\nset -e\ncd /workspace\ngrpe alpha words.txt\nEOF\nbash /tmp/job.sh",
        "command_not_found",
        Site("grpe"),
    ),
    tool('backup() { cp -v "$1" "$1.bak"; }; backup data/ledger.db', "path_not_found", Site("data/ledger.db")),
    tool("DIR=/workspace/data; head -3 $DIR/rows.csv", "path_not_found", Site("$DIR/rows.csv")),
    tool(
        'cat < "$HOME/.config/app/settings.toml"',
        "path_not_found",
        Site("$HOME/.config/app/settings.toml"),
        Site('"$HOME/.config/app/settings.toml"'),
    ),
    tool(
        "wc -w 'my other words.txt' words.txt",
        "path_not_found",
        Site("my other words.txt"),
        Site("'my other words.txt'"),
    ),
    tool("(cd docs/build && make html)", "path_not_found", Site("docs/build")),
    tool('while IFS=, read -r name amount; do echo "$name"; done < input.csv', "path_not_found", Site("input.csv")),
    tool(
        "sort words.txt missing/words.txt | uniq | tail -1; exit ${PIPESTATUS[0]}",
        "path_not_found",
        Site("missing/words.txt"),
    ),
    tool("tar czf /tmp/out.tgz words.txt missing_dir 2>&1", "path_not_found", Site("missing_dir")),
    tool("cp scripts/*.py /tmp/", "path_not_found", Site("scripts/*.py")),
    tool(
        "sed -i.bak 's/alpha/beta/' word.txt && diff word.txt word.txt.bak",
        "path_not_found",
        Site(("word.txt", 0)),
        Site(("word.txt", 1)),
    ),
    tool('echo "a b" > "$OUT/file.txt"', "permission_denied", Site("$OUT/file.txt"), Site('"$OUT/file.txt"')),
    tool("mkdir -p build && cp -r lib/. /usr/share/ledger/", "permission_denied", Site("/usr/share/ledger/")),
    tool("python3 -m http.server 80 2>&1 | tail -1; exit ${PIPESTATUS[0]}", "permission_denied"),
    tool(
        "cat <<'EOF' | tee /etc/profile.d/app.sh\nexport A=1\nEOF", "permission_denied", Site("/etc/profile.d/app.sh")
    ),
    tool("scripts/report.pl", "permission_denied", Site("scripts/report.pl")),
    tool("systemctl restart nginx", "command_not_found", Site("systemctl")),
    tool("cat words.txt | while read -r w n; do figlet $w; done", "command_not_found", Site("figlet")),
    tool(
        "if pip-compile --version; then echo yes; else pip-compile; fi",
        "command_not_found",
        Site(("pip-compile", 1)),
        Site(("pip-compile", 0)),
    ),
    tool("echo start && (sleep 0.1; go test ./...) && echo end", "command_not_found", Site("go")),
    # arguments
    tool("printf '%d\\n' abc", "invalid_arguments", Site("abc")),
    tool("numfmt --to=iec 12x", "invalid_arguments", Site("12x")),
    tool("join -1 x words.txt words.txt", "invalid_arguments", Site(("x", 0))),
    tool("touch -d 'the day after' words.txt", "invalid_arguments", Site("the day after"), Site("'the day after'")),
    tool("wc --lines=3 words.txt", "invalid_arguments", Site("--lines=3"), Site("--lines")),
    tool("diff words.txt", "invalid_arguments", Site("diff words.txt")),
    tool("find . -name '*.log' | xargs rm", "invalid_arguments", Site("rm"), Site("xargs rm")),
    tool("ls | xargs --max-lins 1 echo", "invalid_arguments", Site("--max-lins")),
    tool("rg -n 'amount[' lib", "invalid_arguments", Site("amount["), Site("'amount['")),
    tool("find . -mtime soon -print", "invalid_arguments", Site("soon")),
    tool("mktemp -d /tmp/abc", "invalid_arguments", Site("/tmp/abc"), also=("nonzero_exit",)),
    tool("perl --bogus -e 1", "invalid_arguments", Site("--bogus")),
    # little languages
    tool("awk '{ sum += $2 } END { print sum / }' words.txt", "syntax_error"),
    tool("sed -E 's/(alpha/beta/' words.txt", "syntax_error"),
    tool("sed -n '2,4' words.txt", "syntax_error"),
    tool("let total=1+*2", "syntax_error"),
    tool("jq '.users[] | select(.age > 30' <<< '{\"users\": []}'", "syntax_error"),
    tool("jq 'map(.name | upcase)' <<< '[]'", "syntax_error", also=("nonzero_exit",)),
    tool("echo '{name: Ann}' | jq .name", "syntax_error"),
    tool("jq -r '.[0].total + \"x\"' <<< '[{\"total\": 3}]'", "runtime_error", also=("nonzero_exit",)),
    tool("sqlite3 t.db 'CREATE TABLE u(id INTEGER PRIMARY KEY); SELECT count(* FROM u'", "syntax_error"),
    tool(
        'sqlite3 t.db "CREATE TABLE u(id INTEGER PRIMARY KEY); INSERT INTO u VALUES (1); INSERT INTO u VALUES (1)"',
        "nonzero_exit",
        also=("runtime_error",),
    ),
    tool("awk -F, 'NR > 1 { print 10 / ($2 - 3) }' ledger.csv", "runtime_error"),
    tool("tar xzf words.txt", "nonzero_exit", Site(WHOLE)),
    # other languages at run time
    tool("perl scripts/report.pl", "runtime_error", Site(file="scripts/report.pl", at="$entry->amount")),
    tool(
        'perl -e \'open(my $fh, "<", "input.dat") or die "cannot open input.dat: $!"\'',
        "path_not_found",
        Site(("input.dat", 0)),
        Site(("input.dat", 1)),
        also=("runtime_error",),
    ),
    tool("ruby scripts/tally.rb", "runtime_error", Site(file="scripts/tally.rb", at="row.fetch")),
    tool(
        "ruby big.rb 2>&1 | cat; exit ${PIPESTATUS[0]}",
        "runtime_error",
        Site(file="big.rb", at="puts Integer"),
        files=BIG,
    ),
    tool("node app.js", "runtime_error", Site(file="lib/total.js", at="row.amount.value")),
    tool("node load.js", "path_not_found"),
    tool('node -e "\nconst rows = [1, 2];\nrows.push(3);\nrows.sum();\n"', "runtime_error"),
    tool("NODE_OPTIONS=--trace-warnings node --input-type=module -e \"import x from 'left-pad'; x()\"", "import_error"),
    tool("perl -MLWP::Simple -e 'getprint(\"http://example.com\")'", "import_error"),
    # git
    git(PATCH, "patch_failed", Site(file="poem.txt", line=2)),
    git(MAILS + "git am /tmp/mails/*.patch", "patch_failed", Site(file="poem.txt", line=1), Site(file="poem.txt")),
    git("git revert --no-commit HEAD~0 && git merge topic; git status -s", None),
    git(
        "git checkout -q topic && git merge main --no-edit 2>&1 | tail -1; git diff --check",
        "nonzero_exit",
        also=("patch_failed",),
    ),
    git(
        "git stash -q && git checkout -q topic && git stash apply",
        "patch_failed",
        Site(file="poem.txt"),
        setup="sed -i 's/three on main/changed/' poem.txt",
    ),
    git("git cherry-pick topic~0 || git status", None),
    git("git rebase --onto topic HEAD~1 main", "patch_failed", Site(file="poem.txt")),
    git("git diff HEAD~20 -- poem.txt", "invalid_arguments", Site("HEAD~20"), also=("path_not_found",)),
    git("git checkout -b main", "nonzero_exit", Site(WHOLE)),
    git("git push --set-upstream", "nonzero_exit", Site(WHOLE)),
    git("git log -n five", None),  # git takes it for 0
    git("git restore sonnet.txt", "path_not_found", Site("sonnet.txt")),
    git("git blame rhyme.txt", "path_not_found", Site("rhyme.txt")),
    # no network
    tool(
        "curl -fsSL https://dl.example.org/tool/v1.2/tool.tgz -o /tmp/tool.tgz && tar xzf /tmp/tool.tgz",
        "policy_violation",
        Site("https://dl.example.org/tool/v1.2/tool.tgz"),
        Site("dl.example.org"),
    ),
    tool(
        "git clone --depth 1 https://git.example.org/a/b.git /tmp/b 2>&1 | tail -1; exit ${PIPESTATUS[0]}",
        "policy_violation",
        Site("https://git.example.org/a/b.git"),
        Site("git.example.org"),
    ),
    tool(
        'URL=https://files.example.com/data.zip\nwget -nv "$URL" -O /tmp/data.zip',
        "policy_violation",
        Site("https://files.example.com/data.zip"),
        Site("files.example.com"),
        Site("$URL"),
        Site('"$URL"'),
    ),
    tool(
        "ruby -ropen-uri -e 'puts URI.open(\"https://example.org/list\").read'",
        "policy_violation",
        Site("https://example.org/list"),
        Site("example.org"),
    ),
    tool(
        "curl -s -o /dev/null -w '%{http_code}' https://status.example.com", "nonzero_exit", also=("policy_violation",)
    ),
    tool("curl -sS -X POST -d 'a=1' http://localhost:8765/jobs", "nonzero_exit", Site(WHOLE)),
    # limits
    tool("timeout 2 bash -c 'for i in 1 2 3 4 5; do echo step $i; sleep 1; done'", "timeout", Site(WHOLE)),
    tool("echo compiling; (while :; do sleep 1; done) & wait", "timeout", Site(WHOLE), limit_s=3),
    tool("fallocate -l 200M /tmp/disk.img", "resource_limit", Site(WHOLE)),
    tool("ulimit -v 100000; perl -e '$x = \"a\" x 3_000_000_000; print length $x'", "resource_limit"),
    tool("cat words.txt words.txt > /dev/full 2>&1; exit", "nonzero_exit"),
]
