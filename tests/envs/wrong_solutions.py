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
    "archive-restore": [
        (
            "unpacks the full archive only, with the modes of its own umask",
            "cd /workspace; mkdir restored; tar -xf backups/*.full.tar.gz -C restored;"
            " echo 2025-12-01 > restored_day.txt",
            0.0,
            0.0,
        ),
        (
            "unpacks all that unpacks and deletes nothing",
            "cd /workspace; mkdir restored; for a in backups/*.tar.*; do tar -xpf $a -C restored; done;"
            " echo 2025-12-06 > restored_day.txt",
            0.3,
            0.4,
        ),
        (
            "forgets the permission bits",
            "cd /workspace; mkdir restored; for a in backups/2025-12-0[1-4]*; do"
            ' tar -xOf $a DELETED 2> /dev/null | while read -r gone; do rm -rf "restored/$gone"; done;'
            " tar -xf $a -C restored --exclude=DELETED; done; echo 2025-12-04 > restored_day.txt",
            0.7,
            0.9,
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
    "cron-report": [
        (
            "repairs the directory only",
            'cd /workspace/nightly; sed -i \'s/^[.] lib.sh$//; s/^cd .*$/cd "$(dirname "$0")"; . .\\/lib.sh;'
            " mkdir -p out/; s/^echo .*//' report.sh;"
            " echo '30 2 * * 1-5 bash /workspace/nightly/report.sh $(date +%F)' > crontab",
            0.1,
            0.2,
        ),
        (
            "writes the crontab only",
            "cd /workspace/nightly; echo '30 2 * * mon-fri bash /workspace/nightly/report.sh $(date +\\%F)' > crontab",
            0.1,
            0.2,
        ),
        (
            "prints the answers of the days that are there",
            'cd /workspace/nightly; printf \'cd "$(dirname "$0")";'
            " mkdir -p out; echo food 1300 > out/report-$1.txt\\n' > report.sh",
            0.0,
            0.0,
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
    "git-bisect": [
        (
            "blames the last commit that touched the file",
            "cd /workspace/invoice; git log -1 --format=%H -- invoice.py > ../culprit.txt; git config user.name A;"
            " git config user.email a@example.org; git revert --no-edit $(cat ../culprit.txt)",
            0.0,
            0.0,
        ),
        (
            "finds it and goes back to before it",
            "cd /workspace/invoice; git bisect start main v1.0 > /dev/null; git bisect run ./check.sh > /dev/null 2>&1;"
            " git rev-parse refs/bisect/bad > ../culprit.txt; git bisect reset 2> /dev/null;"
            " git reset -q --hard $(cat ../culprit.txt)~",
            0.2,
            0.3,
        ),
        (
            "finds it and repairs the program by hand, not the rest",
            "cd /workspace/invoice; git bisect start main v1.0 > /dev/null; git bisect run ./check.sh > /dev/null 2>&1;"
            " git rev-parse refs/bisect/bad > ../culprit.txt; git bisect reset 2> /dev/null;"
            " git config user.name A; git config user.email a@example.org;"
            " git revert -n $(cat ../culprit.txt); git checkout -q main README; git commit -qam 'Round once'",
            0.5,
            0.7,
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
    "log-redaction": [
        ("lets everything through", "cd /workspace; printf '#!/bin/sh\\ncat\\n' > redact; chmod +x redact", 0.0, 0.0),
        (
            "takes the first patterns that come to mind",
            "cd /workspace; printf '#!/bin/sh\\nsed -E \"s/(password|token|secret)=[^ ]+/\\\\1=***/g;"
            " s/[^ ]+@[^ ]+/<email>/g; s/([0-9]+[.]){3}[0-9]+/<ip>/g; s/([0-9]{4}[- ]?){3}([0-9]{4})/<card"
            " \\\\2>/g\"\\n' > redact; chmod +x redact; ./redact < sample.log",
            0.0,
            0.2,
        ),
        (
            "does not check cards",
            "cd /workspace; cat > redact <<'EOF'\n#!/usr/bin/perl\n"
            "while (<STDIN>) {\n"
            "s/(?<![A-Za-z0-9_])((?:password|token|secret)[=:] *)[^ ,;\\r\\n]+/$1***/gi;\n"
            "s/[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\\.[A-Za-z0-9-]+)+/<email>/g;\n"
            "s/(?<![0-9])(?<![0-9]\\.)(?:(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)\\.){3}"
            "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)(?!\\.?[0-9])/<ip>/g;\n"
            "s/\\d{4}[- ]?\\d{4}[- ]?\\d{4}[- ]?(\\d{4})/<card $1>/g;\nprint;\n}\nEOF\nchmod +x redact",
            0.7,
            0.9,
        ),
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
    "release-links": [
        (
            "orders by name and by what current says",
            "cd /workspace/app; ln -sfn releases/v2.0.0 current; cd releases; ls | sort -r | tail -n +4 |"
            " xargs rm -rf; for r in *; do ln -sfn ../../shared/config.ini $r/config.ini;"
            " ln -sfn ../../shared/uploads $r/uploads; done",
            0.0,
            0.0,
        ),
        (
            "makes links that leave the app and forgets the uploads",
            "cd /workspace/app; rm -r releases/v0.9.0 releases/v1.11.0 releases/v2.0.0;"
            " ln -sfn /workspace/app/releases/v1.10.1 current; for r in releases/*; do"
            " ln -sfn /workspace/app/shared/config.ini $r/config.ini; ln -sfn /workspace/app/shared/uploads $r/uploads;"
            " done; find . -type l ! -exec test -e {} \\; -delete",
            0.3,
            0.5,
        ),
        (
            "removes every broken link first",
            "cd /workspace/app; find . -type l ! -exec test -e {} \\; -delete; ln -s releases/v1.10.1 current",
            0.4,
            0.5,
        ),
    ],
    "shift-hours": [
        (
            "counts overlapping shifts twice and forgets midnight",
            'cd /workspace; awk \'/^#/ || NF < 3 {next} $3 == "open" {print $1 > "open.txt"; next}'
            ' {print $1 "," substr($2, 1, 10) ",480"}\' shifts.txt | sort -u > days.csv; sort -uo open.txt open.txt',
            0.1,
            0.2,
        ),
        (
            "uses the calendar's year for weeks",
            "cd /workspace; python3 - <<'EOF'\n"
            "import re, collections, datetime as d\nm = collections.defaultdict(set); o = set()\n"
            "def at(s): return int(d.datetime.fromisoformat(s.replace('Z', '+00:00')).timestamp()) // 60\n"
            "for line in open('shifts.txt'):\n    f = line.split()\n    if not f or line[0] == '#': continue\n"
            "    if f[2] == 'open': o.add(f[0]); continue\n"
            "    g = re.match(r'[+](?:(\\d+)h)?(?:(\\d+)m)?$', f[2])\n    a = at(f[1])\n"
            "    b = a + 60 * int(g[1] or 0) + int(g[2] or 0) if g else at(f[2])\n    m[f[0]] |= set(range(a, b))\n"
            "for name, form in (('days.csv', '%Y-%m-%d'), ('weeks.csv', '%Y-W%V')):\n"
            "    c = collections.Counter(p + ',' + d.datetime.fromtimestamp(i * 60, d.timezone.utc).strftime(form)"
            " for p, s in m.items() for i in s)\n"
            "    open(name, 'w').write(''.join(sorted(f'{k},{v}\\n' for k, v in c.items())))\n"
            "open('open.txt', 'w').write('\\n'.join(sorted(o)))\nEOF",
            0.7,
            0.8,
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
