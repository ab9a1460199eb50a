from pagelist import GAP, Paginator, link_row, next_and_previous


def test_all_pages_of_a_short_list():
    assert link_row(Paginator(range(30)), current=2) == [1, 2, 3]


def test_gaps_on_both_sides():
    assert link_row(Paginator(range(200)), current=10) == [1, GAP, 9, 10, 11, GAP, 20]


def test_more_around():
    assert link_row(Paginator(range(100)), current=5, around=2) == [1, GAP, 3, 4, 5, 6, 7, GAP, 10]


def test_next_and_previous():
    pages = Paginator(range(30))
    assert next_and_previous(pages, 1) == (None, 2)
    assert next_and_previous(pages, 3) == (2, None)
