"""git commands that fail, and patches that do not apply."""

from __future__ import annotations

from .model import Recipe, Site, row

STALE = """--- a/poem.txt
+++ b/poem.txt
@@ -1,4 +1,4 @@
 one
-zwei
+2
 three
 four
"""
SHORT_COUNT = """--- a/geo.py
+++ b/geo.py
@@ -1,9 +1,3 @@
 def area(w, h):
+    # width times height
     return w * h
"""
NEW_FILE = """diff --git a/geo.py b/geo.py
new file mode 100644
--- /dev/null
+++ b/geo.py
@@ -0,0 +1 @@
+x = 1
"""


def repo(
    command: str,
    kind: str | None,
    *sites: Site,
    setup: str = "",
    also: tuple[str, ...] = (),
    ambiguous: bool = False,
    files: dict[str, str] | None = None,
) -> Recipe:
    """Build a recipe in /testbed with the two-branch history."""
    return row(
        command, kind, *sites, tree="repo", cwd="/testbed", setup=setup, also=also, ambiguous=ambiguous, files=files
    )


RECIPES: list[Recipe] = [
    repo("git merge feature -m 'take feature'", "patch_failed", Site(file="poem.txt")),
    repo("git rebase feature", "patch_failed", Site(file="poem.txt")),
    repo("git checkout -q feature && git cherry-pick main 2>&1 | tail -3; git status --short", None),
    repo(
        "git revert --no-edit HEAD~1",
        "patch_failed",
        Site(file="poem.txt"),
        setup="sed -i 's/2 from main/2 again/' poem.txt; git commit -qam 'again'",
    ),
    repo(
        "git stash pop",
        "patch_failed",
        Site(file="poem.txt"),
        setup="sed -i 's/three/THREE/' poem.txt; git stash -q; sed -i 's/three/3/' poem.txt; git commit -qam three",
    ),
    repo("git apply fix.diff", "patch_failed", Site(file="poem.txt", line=1), files={"fix.diff": STALE}),
    repo(
        "cat > /tmp/p.diff <<'EOF'\n" + STALE + "EOF\ngit apply -v /tmp/p.diff",
        "patch_failed",
        Site(file="poem.txt", line=1),
    ),
    repo("patch -p1 < fix.diff", "patch_failed", Site(file="poem.txt", line=1), files={"fix.diff": STALE}),
    repo("patch -p1 --forward < fix.diff; cat poem.txt.rej", None, files={"fix.diff": STALE}),
    repo(
        "git apply short.diff",
        "patch_failed",
        Site("short.diff", line=7),
        Site(file="short.diff", line=7),
        files={"short.diff": SHORT_COUNT},
    ),
    repo(
        "patch -p0 -i short.diff",
        "patch_failed",
        Site("short.diff"),
        Site(file="short.diff", line=6),
        files={"short.diff": SHORT_COUNT},
    ),
    repo("git apply new.diff", "patch_failed", Site(file="geo.py"), files={"new.diff": NEW_FILE}),
    repo("git apply <<'EOF'\nplease change line two\nEOF", "patch_failed"),
    repo(
        "git am broken.mbox",
        "patch_failed",
        Site(file="poem.txt", line=1),
        Site(file="poem.txt"),
        files={
            "broken.mbox": "From 1111111111111111111111111111111111111111 Mon Sep 17 00:00:00 2001\n"
            "From: Agent <agent@example.com>\nDate: Wed, 1 May 2024 10:00:00 +0000\nSubject: [PATCH] two\n\n---\n"
            + STALE
            + "-- \n2.39\n"
        },
    ),
    repo("git checkout main -- src/app.py", "path_not_found", Site("src/app.py")),
    repo("git add notes.md geo.py", "path_not_found", Site("notes.md")),
    repo("git rm old.txt", "path_not_found", Site("old.txt")),
    repo(
        "git mv poems.txt verse.txt",
        "path_not_found",
        Site("poems.txt"),
        Site("poems.txt verse.txt"),
        also=("nonzero_exit",),
        ambiguous=True,
    ),
    repo("git commit -m 'wip' missing.txt", "path_not_found", Site("missing.txt")),
    repo(
        "git switch develop",
        "nonzero_exit",
        Site("git switch develop"),
        Site("develop"),
        also=("path_not_found", "invalid_arguments"),
        ambiguous=True,
    ),
    repo("git diff main..develop", "invalid_arguments", Site("main..develop")),
    repo(
        "git log --since=yesterday nosuchfile.txt",
        "invalid_arguments",
        Site("nosuchfile.txt"),
        also=("path_not_found",),
    ),
    repo("git show HEAD~9", "invalid_arguments", Site("HEAD~9")),
    repo("git rev-parse origin/main", "invalid_arguments", Site("origin/main")),
    repo("git reset --hrad HEAD", "invalid_arguments", Site("--hrad")),
    repo("git branch -x old", "invalid_arguments", Site("-x"), Site("x old"), Site("x")),
    repo("git stauts", "invalid_arguments", Site("stauts")),
    repo("git commit -qm 'nothing to do'", "nonzero_exit", Site("git commit -qm 'nothing to do'")),
    repo("git ls-files --error-unmatch geometry.py", "path_not_found", Site("geometry.py")),
    repo(
        "git show HEAD:src/area.py",
        "path_not_found",
        Site("src/area.py"),
        Site("HEAD:src/area.py"),
        also=("invalid_arguments", "nonzero_exit"),
    ),
    repo(
        "git push origin main",
        "nonzero_exit",
        Site("git push origin main"),
        Site("origin"),
        ambiguous=True,
        also=("path_not_found",),
    ),
    repo("git checkout feature", "nonzero_exit", Site("git checkout feature"), setup="echo changed > poem.txt"),
    repo("git branch -d feature", "nonzero_exit", Site("git branch -d feature")),
    repo("git tag v1", "nonzero_exit", Site("git tag v1")),
    repo(
        "git merge nobranch",
        "nonzero_exit",
        Site("git merge nobranch"),
        Site("nobranch"),
        also=("path_not_found", "invalid_arguments"),
        ambiguous=True,
    ),
    row(
        "cd /tmp && git log --oneline -3",
        "nonzero_exit",
        Site("cd /tmp && git log --oneline -3"),
        Site("git log --oneline -3"),
    ),
    repo("git commit --amend --no-edit -q && git add .git/config/x", "path_not_found", Site(".git/config/x")),
    repo(
        "git apply --3way side.diff", "patch_failed", Site(file="poem.txt"), setup="git diff main~1 feature > side.diff"
    ),
    repo("patch -p1 -N < done.diff", "patch_failed", Site(file="poem.txt"), setup="git diff HEAD~1 HEAD > done.diff"),
    repo(
        "patch -p1 <<'EOF'\n*** Begin Patch\n*** Update File: poem.txt\n-one\n+uno\n*** End Patch\nEOF", "patch_failed"
    ),
    repo(
        "git apply -p0 fix.diff",
        "patch_failed",
        Site(file="b/poem.txt"),
        Site(file="a/poem.txt"),
        Site("fix.diff"),
        files={"fix.diff": STALE},
        also=("path_not_found",),
        ambiguous=True,
    ),
    repo("git cherry-pick feature && git log --oneline -1", "patch_failed", Site(file="poem.txt")),
    repo("git merge feature 2>&1 | grep CONFLICT", None),
    repo("git merge -q feature; git commit -qm 'merge anyway'", "nonzero_exit", also=("patch_failed",), ambiguous=True),
    repo(
        "patch -p1 --dry-run < two.diff",
        "patch_failed",
        Site(file="poem.txt", line=1),
        files={"two.diff": STALE + "@@ -9,2 +9,3 @@\n nine\n+nine and a half\n ten\n"},
    ),
    repo("git apply --index fix.diff", "patch_failed", Site(file="poem.txt"), files={"fix.diff": STALE}),
    repo(
        "git apply --reverse half.diff",
        "patch_failed",
        Site(file="poem.txt", line=1),
        setup="git diff main~1 feature > half.diff",
    ),
]
