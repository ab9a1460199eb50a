from errata_verify import NotSolved, check, probe_json

REPORT = "report-2024-02-29.txt"
PLAIN = {REPORT: "B 2\na b 3\nb 1\nfood 1295\nrent 90000\n"}


def expect(name, result, reports):
    found = probe_json("runs")[name]
    assert found == [result, reports], f"{name}: {found}"


@check()
def it_works_elsewhere_without_an_environment():
    expect("plain", [0, 0, 0], PLAIN)
    expect("again", [0, 0, 0], PLAIN)


@check()
def it_takes_odd_data():
    expect("windows", [0, 0, 0], {REPORT: "Zoo visit 801\nfood 10\n"})
    expect("quotes", [0, 0, 0], {REPORT: '"x" 2\n$HOME 3\n\\n 5\na* 4\nit\'s 1\n'})
    expect("no_last_line_end", [0, 0, 0], {REPORT: "a 1\nb 20\n"})
    expect("large", [0, 0, 0], {REPORT: "a 6000000000\n"})


@check()
def it_refuses_wrong_data():
    for name in ("word", "fields", "no_amount"):
        expect(name, [1, 0, 1], {})


@check()
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
    minute, hour, day, month, weekday = entry["when"]
    try:
        assert values(minute, 0, 59) == {30} and values(hour, 0, 23) == {2}
        assert (day, month) == ("*", "*")
        names = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
        assert values(weekday, 0, 7, names) == {1, 2, 3, 4, 5}
    except ValueError as error:
        raise NotSolved(f"crontab: {entry['when']}: {error}") from error


@check()
def the_entry_writes_todays_report():
    entry = probe_json("runs")["crontab"]
    assert entry["entries"] == 1 and entry["status"] == 0 and entry["right"] and entry["bash"], entry
