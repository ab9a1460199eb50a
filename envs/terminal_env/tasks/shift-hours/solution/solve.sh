cd /workspace
python3 - <<'PY'
import re
from collections import Counter, defaultdict
from datetime import datetime, timedelta, timezone


def moment(text):
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc)


shifts, left_open = defaultdict(list), set()
with open("shifts.txt") as file:
    for line in file:
        fields = line.split()
        if not fields or line.startswith("#"):
            continue
        person, start, end = fields
        if end == "open":
            left_open.add(person)
        elif end.startswith("+"):
            hours, minutes = re.fullmatch(r"\+(?:(\d+)h)?(?:(\d+)m)?", end).groups()
            shifts[person].append((moment(start), moment(start) + timedelta(hours=int(hours or 0), minutes=int(minutes or 0))))
        else:
            shifts[person].append((moment(start), moment(end)))
days, weeks = Counter(), Counter()
for person, intervals in shifts.items():
    worked_to = datetime.min.replace(tzinfo=timezone.utc)
    for start, end in sorted(intervals):
        start = max(start, worked_to)
        while start < end:
            midnight = start.replace(hour=0, minute=0) + timedelta(days=1)
            stop = min(end, midnight)
            minutes = (stop - start) // timedelta(minutes=1)
            year, week, _ = start.isocalendar()
            days[f"{person},{start:%Y-%m-%d}"] += minutes
            weeks[f"{person},{year}-W{week:02d}"] += minutes
            start = stop
        worked_to = max(worked_to, end)
for name, totals in (("days.csv", days), ("weeks.csv", weeks)):
    with open(name, "w") as file:
        file.writelines(f"{line}\n" for line in sorted(f"{key},{minutes}" for key, minutes in totals.items()))
with open("open.txt", "w") as file:
    file.writelines(f"{person}\n" for person in sorted(left_open))
PY
wc -l days.csv weeks.csv open.txt
