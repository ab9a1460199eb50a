# Twenty-seven commits after v1.0: most are harmless, a few do not start, one rounds where it should not.
git init -q -b main invoice
cd invoice
git config user.name Ana
git config user.email ana@example.org
git config gc.auto 0

day=0
keep() {
  day=$((day + 1))
  export GIT_AUTHOR_DATE="$(printf '2025-11-%02dT09:00:00Z' "$day")" GIT_COMMITTER_DATE="$(printf '2025-11-%02dT09:00:00Z' "$day")"
  git add -A
  git commit -qm "$1"
}

cat > invoice.py <<'PY'
"""Prints the total of an invoice: lines `QUANTITY CENTS`, one `discount PERCENT`, one `tax PERCENT`."""

import sys


def read(lines):
    items, rates = [], {"discount": 0, "tax": 0}
    for line in lines:
        fields = line.split()
        if fields[0] in rates:
            rates[fields[0]] = int(fields[1])
        else:
            items.append((int(fields[0]), int(fields[1])))
    return items, rates


def subtotal(items):
    return sum(quantity * cents for quantity, cents in items)


def total(items, rates):
    hundredths = subtotal(items) * (100 - rates["discount"])
    return round_half_up(hundredths * (100 + rates["tax"]), 10_000)


def round_half_up(value, unit):
    return (2 * value + unit) // (2 * unit)


def text(cents):
    return f"{cents // 100}.{cents % 100:02d}"


def main():
    items, rates = read(sys.stdin)
    print(text(total(items, rates)))


if __name__ == "__main__":
    main()
PY
cat > check.sh <<'SH'
#!/bin/bash
# 0: right, 1: wrong, 125: does not start.
cd "$(dirname "$0")" || exit 125
python3 -c 'import invoice' 2>/dev/null || exit 125
answer=$(printf '3 333\n1 5\ndiscount 15\ntax 19\n' | python3 invoice.py 2>/dev/null) || exit 125
[ "$answer" = 10.16 ]
SH
chmod +x check.sh
echo '# invoice' > README
keep 'A program that adds invoices up'
git tag v1.0

note() { echo "- $1" >> README; keep "$2"; }
note 'lines are QUANTITY CENTS' 'Say what a line is'
sed -i 's/^import sys$/import sys\n\nCURRENCY = "EUR"/' invoice.py; keep 'Name the currency'
note 'cents are whole numbers' 'Say what a cent is'
sed -i 's/        fields = line.split()/        fields = line.split()\n        if not fields:\n            continue/' invoice.py; keep 'Take empty lines'
note 'empty lines are skipped' 'Say it of empty lines'
sed -i 's/^def text(cents):/def text(cents:/' invoice.py; keep 'Work on the text form'
note 'work in progress' 'Note the work'
sed -i 's/^def text(cents:/def text(cents):/' invoice.py; keep 'The text form is as it was'
sed -i 's/    return f"{cents \/\/ 100}/    sign = "-" if cents < 0 else ""\n    cents = abs(cents)\n    return f"{sign}{cents \/\/ 100}/' invoice.py; keep 'Credit notes have a sign'
note 'credit notes are negative' 'Say it of credit notes'
sed -i 's/    items, rates = \[\], {"discount": 0, "tax": 0}/    items = []\n    rates = {"discount": 0, "tax": 0}/' invoice.py; keep 'One assignment a line'
printf 'all:\n\t./check.sh\n' > Makefile; keep 'make checks'
note 'make runs the check' 'Say how to check'
sed -i 's/^import sys$/import syss/' invoice.py; keep 'Sort the imports'
sed -i 's/^import syss$/import sys/' invoice.py; keep 'Repair the imports'
sed -i 's/    hundredths = subtotal(items) \* (100 - rates\["discount"\])/    reduced = round_half_up(subtotal(items) * (100 - rates["discount"]), 100)/; s/    return round_half_up(hundredths \* (100 + rates\["tax"\]), 10_000)/    return round_half_up(reduced * (100 + rates["tax"]), 100)/' invoice.py
sed -i 's/^# invoice$/# Invoice/' README; keep 'Tidy up'
note 'discount comes before tax' 'Say in which order'
sed -i 's/            rates\[fields\[0\]\] = int(fields\[1\])/            rates[fields[0]] = int(fields[1].rstrip("%"))/' invoice.py; keep 'Take 19% for 19'
note 'percent signs are allowed' 'Say it of percent signs'
sed -i 's/^def main():$/def main()/' invoice.py; keep 'Prepare a command line'
printf 'import argparse\n' > options.py; keep 'Begin with options'
sed -i 's/^def main()$/def main():/' invoice.py; keep 'The command line waits'
rm options.py; keep 'Options wait'
sed -i 's/^def round_half_up(value, unit):$/def round_half_up(value, unit):\n    """Halves go up, as accountants do."""/' invoice.py; keep 'Say how it rounds'
note 'rounds half up, once' 'Say how often it rounds'
sed -i 's/    return sum(quantity \* cents for quantity, cents in items)/    return sum(q * c for q, c in items)/' invoice.py; keep 'Shorter names'
note 'see check.sh' 'Point to the check'
