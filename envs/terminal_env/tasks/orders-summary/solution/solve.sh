cd /workspace
python3 - <<'EOF'
import csv
import json

last = {}
with open("orders.csv", newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
        last[row["order_id"]] = row
summary = {}
for row in last.values():
    entry = summary.setdefault(row["customer"], {"orders": 0, "paid_cents": 0, "cancelled": 0})
    price = row["unit_price"].removeprefix("€").replace(",", ".")
    units, _, cents = price.partition(".")
    entry["orders"] += 1
    if row["status"].strip().lower() == "paid":
        entry["paid_cents"] += int(row["quantity"]) * (int(units) * 100 + int(cents))
    else:
        entry["cancelled"] += 1
with open("summary.json", "w", encoding="utf-8") as file:
    json.dump(summary, file, ensure_ascii=False, indent=2, sort_keys=True)
EOF
cat summary.json
