import datetime

from errata_verify import NotSolved, check, probe_json, require, sha256

REPORT = "report-2024-02-29.txt"
DATA = {
    "nightly/data/2025-12-01.csv": "451737a17b8de043e9ba2a445dcb064fa7ba71f08a7cc460752cfbc84d5f6a78",
    "nightly/data/2025-12-02.csv": "1ac1527d3a22feab94951913510a056742d16ecc220224372ff7888d8cbbd3d4",
    "nightly/data/2025-12-03.csv": "43f67537ac432547aaddb09481c96c6c9a7c38054fd828030757ed6864420142",
}
DAYS = ["2024-02-29", "2031-11-07"]
PLAIN = {REPORT: "B 2\na b 3\nb 1\nfood 1295\nrent 90000\n"}


def expect(name, result, reports):
    found = probe_json("runs")[name]
    assert found == [result, reports], f"{name}: {found}"


@require
def the_data_is_as_it_was():
    for name, digest in DATA.items():
        assert sha256(name) == digest, f"{name} changed"


@require
def its_author_can_still_call_it():
    """A script that refuses everything, or does nothing, is worse than the one to repair."""
    assert probe_json("runs")["author"] == [0, {REPORT: "food 4\nrent 2\n"}], probe_json("runs")["author"]


@check()
def it_works_elsewhere_without_an_environment():
    expect("plain", [0, 0, 0], PLAIN)
    expect("again", [0, 0, 0], PLAIN)


@check(needs=[it_works_elsewhere_without_an_environment])
def it_takes_odd_data():
    expect("windows", [0, 0, 0], {REPORT: "Zoo visit 801\nfood 10\n"})
    expect("quotes", [0, 0, 0], {REPORT: '"x" 2\n$HOME 3\n\\n 5\na* 4\nit\'s 1\n'})
    expect("no_last_line_end", [0, 0, 0], {REPORT: "a 1\nb 20\n"})
    expect("large", [0, 0, 0], {REPORT: "a 6000000000\n"})


@check(needs=[it_works_elsewhere_without_an_environment])
def it_refuses_wrong_data():
    for name in ("word", "fields", "no_amount"):
        expect(name, [1, 0, 1], {})


@check(needs=[it_works_elsewhere_without_an_environment])
def it_leaves_reports_alone_when_it_fails():
    for name in ("missing", "kept"):
        expect(name, [1, 0, 1], {REPORT: "old\n"})


def values(field, low, high, names=()):
    """Return what a field of a crontab stands for."""
    found = set()
    for part in field.lower().split(","):
        body, _, step = part.partition("/")
        first, dash, last = body.partition("-")
        if body == "*":
            first, last = str(low), str(high)
        elif not dash:
            last = str(high) if step else first
        numbers = [names.index(n) if n in names else int(n) for n in (first, last)]
        found |= set(range(numbers[0], numbers[1] + 1, int(step or 1)))
    return found


@check()
def cron_runs_it_when_asked():
    entry = probe_json("runs")["crontab"]
    assert entry["entries"] == 1, entry
    assert entry["given"] == [[["bash", day]] for day in DAYS], f"report.sh gets {entry['given']}"
    minute, hour, day, month, weekday = entry["when"]
    try:
        assert values(minute, 0, 59) == {30} and values(hour, 0, 23) == {2}
        assert (day, month) == ("*", "*")
        names = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
        assert values(weekday, 0, 7, names) == {1, 2, 3, 4, 5}
    except ValueError as error:
        raise NotSolved(f"crontab: {entry['when']}: {error}") from error


@check(needs=[cron_runs_it_when_asked])
def the_entry_writes_todays_report():
    entry = probe_json("runs")["crontab"]
    for day, found in zip(DAYS, entry["reports"], strict=True):
        number = datetime.date.fromisoformat(day).toordinal()
        assert found == [[0, 0, 0], {f"report-{day}.txt": f"day {number}\n"}], f"{day}: {found}"
