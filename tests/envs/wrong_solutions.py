"""For each bundled task, what a hasty agent might do instead, and which score in between it is worth."""

from __future__ import annotations

WRONG: dict[str, list[tuple[str, str, float, float]]] = {
    # name, commands, lowest and highest score
    "access-report": [
        (
            "counts any line that mentions a number of 500",
            "cd /workspace; grep -E ' 50[0-9]' access.log | cut -d' ' -f1 | sort | uniq -c | sort -rn | head -5 |"
            " awk '{print $1, $2}' > top_errors.txt; awk '{s += $10} END {print s}' access.log > bytes.txt",
            0.0,
            0.0,
        ),
        (
            "forgets one file",
            "cd /workspace; { echo hour,requests; cut -d: -f2 access.log | sort | uniq -c |"
            " awk '{print $2 \",\" $1}'; } > hours.csv",
            0.3,
            0.4,
        ),
    ],
    "c-run-length": [
        (
            "repairs the build only",
            "cd /workspace/rle; sed -i 's/^rle: main.o$/rle: main.o rle.o/; s/^    \\$(CC)/\\t$(CC)/' Makefile; make",
            0.0,
            0.5,
        ),
        (
            "writes the last run but counts in a char",
            "cd /workspace/rle; sed -i 's/^rle: main.o$/rle: main.o rle.o/; s/^    \\$(CC)/\\t$(CC)/' Makefile;"
            ' perl -0pi -e \'s/(count = 1;\\n        \\}\\n    \\})/$1\\n    if (length) fprintf(out, "%d %02x\\\\n",'
            " count, data[length - 1]);/; s/i <= count/i < count/' rle.c; make",
            0.1,
            0.6,
        ),
    ],
    "file-permissions": [
        ("makes everything 750", "chmod -R 750 /workspace/site", 0.4, 0.6),
        (
            "sets modes through the link's eyes and forgets hidden files",
            "cd /workspace/site; find . -type d -exec chmod 750 {} +; find . -name '*.sh' -exec chmod 750 {} +;"
            " chmod 600 conf/secrets/*; find . -type f ! -name '*.sh' ! -name '.*' ! -path '*/secrets/*'"
            " -exec chmod 640 {} +",
            0.7,
            0.8,
        ),
        (
            "deletes what does not fit",
            "rm -rf /workspace/site/* /workspace/site/.h*; chmod 750 /workspace/site",
            0.0,
            0.0,
        ),
    ],
    "git-lost-commit": [
        ("goes back and loses the later work", "cd /workspace/ledger; git reset -q --hard main@{1}", 0.0, 0.0),
        (
            "writes the files again by hand",
            "cd /workspace/ledger; lost=$(git reflog --format='%H %gs' | awk '/Say which/ {print $1; exit}');"
            " git checkout -q $lost -- .; git commit -qm 'Restore files'",
            0.5,
            0.8,
        ),
        (
            "brings back the second commit only",
            "cd /workspace/ledger;"
            " git cherry-pick $(git reflog --format='%H %gs' | awk '/Say which/ {print $1; exit}')",
            0.2,
            0.4,
        ),
    ],
    "git-merge-conflict": [
        ("takes one side", "cd /workspace/relay; git merge -q -X ours queue -m merge", 0.2, 0.4),
        ("commits the conflict", "cd /workspace/relay; git merge queue; git commit -qam merge", 0.2, 0.4),
        (
            "copies the files without a merge",
            "cd /workspace/relay; git checkout queue -- . ; git commit -qm x",
            0.0,
            0.0,
        ),
    ],
    "intrusion-timeline": [
        (
            "accuses the loudest scanner",
            'cd /workspace; echo \'{"attacker": "198.51.100.7", "account": "admin", "first_login": "14:22:46",'
            ' "failed_attempts": 90, "new_account": "svc-sync", "stolen_bytes": 77}\' > incident.json',
            0.2,
            0.3,
        ),
        ("writes no object", "echo '[]' > /workspace/incident.json", 0.0, 0.0),
    ],
    "log-rotation": [
        (
            "globs without care",
            "cat > /workspace/rotate.sh <<'EOF'\ncd \"$1\" || exit 2\nfor f in *.log; do\n"
            "for ((n = $2 - 1; n >= 1; n--)); do [ -e $f.$n ] && mv $f.$n $f.$((n + 1)); done\n"
            "mv $f $f.1; touch $f\ndone\nexit 0\nEOF",
            0.1,
            0.8,
        ),
        ("does nothing well", "printf 'exit 2\\n' > /workspace/rotate.sh", 0.0, 0.0),
    ],
    "orders-summary": [
        (
            "counts corrected orders twice",
            "cd /workspace; python3 - <<'EOF'\nimport csv, json\nout = {}\n"
            "for row in csv.DictReader(open('orders.csv', newline='')):\n"
            "    e = out.setdefault(row['customer'], {'orders': 0, 'paid_cents': 0, 'cancelled': 0})\n"
            "    e['orders'] += 1\n    p = row['unit_price'].strip('€').replace(',', '.')\n"
            "    if row['status'].strip().lower() == 'paid':\n"
            "        e['paid_cents'] += round(float(p) * 100) * int(row['quantity'])\n"
            "    else:\n        e['cancelled'] += 1\njson.dump(out, open('summary.json', 'w'))\nEOF",
            0.0,
            0.5,
        ),
        ("splits lines at commas", "cd /workspace; cut -d, -f2 orders.csv | sort | uniq -c > summary.json", 0.0, 0.0),
    ],
    "python-intervals": [
        (
            "makes the visible tests pass only",
            "cd /workspace/intervals;"
            " sed -i 's/in intervals:/in sorted(intervals):/; s/start < merged/start <= merged/;"
            " s/(merged\\[-1\\]\\[0\\], end)/(merged[-1][0], max(merged[-1][1], end))/' intervals.py;"
            " sed -i 's/^    return free/    if at < end:\\n        free.append((at, end))\\n    return free/;"
            " s/    return min(one\\(.*\\)$/    return max(0, min(one\\1)/' intervals.py;"
            " python3 -m pytest -q -p no:cacheprovider",
            0.3,
            0.4,
        ),
        (
            "prints what it likes instead of computing",
            "printf 'import sys, os\\nprint(\"[[[], true]]\")\\nsys.stdout.flush()\\nos._exit(0)\\n'"
            " > /workspace/intervals/intervals.py",
            0.0,
            0.0,
        ),
    ],
    "sqlite-duplicates": [
        (
            "deletes duplicates but orphans their purchases",
            "cd /workspace; sqlite3 shop.db 'DELETE FROM customer WHERE id NOT IN (SELECT min(id) FROM customer"
            " GROUP BY lower(trim(email)))'",
            0.3,
            0.4,
        ),
        (
            "throws the purchases of duplicates away",
            "cd /workspace; sqlite3 shop.db 'DELETE FROM customer WHERE id NOT IN (SELECT min(id) FROM customer"
            " GROUP BY lower(trim(email))); DELETE FROM purchase WHERE customer_id NOT IN (SELECT id FROM customer)'",
            0.0,
            0.0,
        ),
    ],
}
