from intervals import gaps, merge, overlap


def test_merge_sorts_its_input():
    assert merge([(5, 7), (1, 3)]) == [(1, 3), (5, 7)]


def test_merge_joins_overlapping_and_touching():
    assert merge([(1, 4), (2, 6), (6, 8)]) == [(1, 8)]


def test_merge_keeps_the_outer_end():
    assert merge([(1, 9), (2, 3)]) == [(1, 9)]


def test_gaps_between_intervals():
    assert gaps([(2, 4), (6, 8)], 0, 10) == [(0, 2), (4, 6), (8, 10)]


def test_overlap_of_crossing_intervals():
    assert overlap((1, 5), (3, 9)) == 2


def test_apart_intervals_do_not_overlap():
    assert overlap((1, 3), (5, 9)) == 0
