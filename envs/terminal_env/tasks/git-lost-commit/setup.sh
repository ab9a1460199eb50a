git init -q -b main ledger
cd ledger
git config user.name Ana
git config user.email ana@example.org
git config gc.auto 0
at() { export GIT_AUTHOR_DATE="2026-01-0$1T09:00:00Z" GIT_COMMITTER_DATE="2026-01-0$1T09:00:00Z"; }
at 1
printf '# Ledger\n\nBalances from entries.\n' > README.md
printf 'def parse(line):\n    name, _, amount = line.partition(",")\n    return name, int(amount)\n' > parse.py
git add . && git commit -qm 'Parse entries'
at 2
cat > balance.py <<'EOF'
"""Balances by account."""

from parse import parse


def balances(lines):
    """Return the sum of the amounts of each account, by name."""
    total = {}
    for line in lines:
        name, amount = parse(line)
        total[name] = total.get(name, 0) + amount
    return dict(sorted(total.items()))
EOF
printf 'ana,5\nben,-3\nana,7\n' > example.csv
git add . && git commit -qm 'Add balances by account'
at 3
printf '\nRun it with Python 3.11.\n' >> README.md
git commit -qam 'Say which Python'
# The accident: one reset too far, then work goes on.
git reset -q --hard HEAD~2
at 4
printf '*.pyc\n' > .gitignore
git add . && git commit -qm 'Ignore bytecode'
