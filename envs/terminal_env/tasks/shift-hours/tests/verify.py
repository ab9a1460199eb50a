"""Expected rows; the naive sum of overlapping shifts, local days and calendar years give others."""

from errata_verify import check, lines, require, sha256

DAYS = """
ana,2024-02-26,200
ana,2024-02-27,490
ana,2024-02-29,1095
ana,2024-03-01,405
ana,2024-03-29,1255
ana,2024-03-30,445
ana,2024-03-31,200
ana,2024-04-02,700
ana,2024-04-03,800
ana,2024-10-25,480
ana,2024-10-26,60
ana,2024-10-28,480
ana,2024-12-28,150
ana,2025-01-01,45
ben,2024-02-27,60
ben,2024-03-01,5
ben,2024-03-02,470
ben,2024-03-29,45
ben,2024-03-30,145
ben,2024-03-31,815
ben,2024-04-01,490
ben,2024-04-02,480
ben,2024-10-26,615
ben,2024-10-27,480
ben,2024-10-29,480
ben,2024-12-28,60
ben,2024-12-29,615
ben,2024-12-31,200
carla,2024-02-27,285
carla,2024-02-28,330
carla,2024-03-01,480
carla,2024-03-29,45
carla,2024-03-30,475
carla,2024-03-31,35
carla,2024-04-01,440
carla,2024-04-02,142
carla,2024-10-25,480
carla,2024-10-26,475
carla,2024-10-29,80
carla,2024-10-30,1420
carla,2024-12-28,150
carla,2024-12-29,60
carla,2024-12-30,360
carla,2024-12-31,735
carla,2025-01-01,1185
dev,2024-02-28,45
dev,2024-02-29,490
dev,2024-03-01,45
dev,2024-03-29,615
dev,2024-03-30,475
dev,2024-03-31,142
dev,2024-04-01,480
dev,2024-04-02,615
dev,2024-10-25,45
dev,2024-10-26,200
dev,2024-10-28,142
dev,2024-12-28,475
dev,2024-12-29,60
dev,2024-12-30,150
dev,2024-12-31,80
dev,2025-01-01,595
eli,2024-02-27,490
eli,2024-02-28,350
eli,2024-02-29,500
eli,2024-03-01,730
eli,2024-03-29,120
eli,2024-03-30,1440
eli,2024-03-31,1020
eli,2024-04-01,700
eli,2024-04-02,1310
eli,2024-10-25,200
eli,2024-10-29,200
eli,2024-12-28,45
eli,2024-12-29,200
eli,2025-01-01,155
eli,2025-01-02,325
"""
WEEKS = """
ana,2024-W09,2190
ana,2024-W13,1900
ana,2024-W14,1500
ana,2024-W43,540
ana,2024-W44,480
ana,2024-W52,150
ana,2025-W01,45
ben,2024-W09,535
ben,2024-W13,1005
ben,2024-W14,970
ben,2024-W43,1095
ben,2024-W44,480
ben,2024-W52,675
ben,2025-W01,200
carla,2024-W09,1095
carla,2024-W13,555
carla,2024-W14,582
carla,2024-W43,955
carla,2024-W44,1500
carla,2024-W52,210
carla,2025-W01,2280
dev,2024-W09,580
dev,2024-W13,1232
dev,2024-W14,1095
dev,2024-W43,245
dev,2024-W44,142
dev,2024-W52,535
dev,2025-W01,825
eli,2024-W09,2070
eli,2024-W13,2580
eli,2024-W14,2010
eli,2024-W43,200
eli,2024-W44,200
eli,2024-W52,245
eli,2025-W01,480
"""
OPEN = ['ben', 'carla', 'dev']


SHIFTS = "205facb35861af4a617d70e4313c47ff2205e697bc3bf3b4dffc2511c18119aa"


def rows(name):
    return [line.strip() for line in lines(name)]


@require
def the_shifts_are_as_they_were():
    assert sha256("shifts.txt") == SHIFTS


@check()
def who_worked_on_which_day():
    """Offsets and midnight are right; what overlaps may be counted twice."""
    assert [row.rpartition(",")[0] for row in rows("days.csv")] == [row.rpartition(",")[0] for row in DAYS.split()]


@check(needs=[who_worked_on_which_day])
def minutes_by_day():
    assert rows("days.csv") == DAYS.split()


@check(needs=[who_worked_on_which_day])
def minutes_by_week():
    assert rows("weeks.csv") == WEEKS.split()


@check(weight=0.5, needs=[who_worked_on_which_day])
def who_left_a_shift_open():
    assert rows("open.txt") == OPEN
