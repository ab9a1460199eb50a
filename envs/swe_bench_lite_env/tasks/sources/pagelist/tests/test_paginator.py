import pytest

from pagelist import NoSuchPage, Paginator


def test_pages_have_per_page_items():
    pages = list(Paginator(range(25), per_page=10))
    assert [len(page) for page in pages] == [10, 10, 5]
    assert pages[1].items == tuple(range(10, 20))


def test_an_exact_multiple_has_no_empty_page():
    assert Paginator(range(20), per_page=10).number_of_pages == 2


def test_an_empty_list_has_one_empty_page():
    (page,) = Paginator([])
    assert (page.items, page.first, page.last, page.summary) == ((), 0, 0, "no items")


def test_an_orphan_joins_the_page_before():
    pages = list(Paginator(range(21), per_page=10, orphans=2))
    assert [len(page) for page in pages] == [10, 11]
    assert pages[-1].summary == "11-21 of 21"


def test_more_items_than_orphans_make_a_page():
    assert [len(page) for page in Paginator(range(23), per_page=10, orphans=2)] == [10, 10, 3]


def test_a_page_that_is_not_there_is_refused():
    pages = Paginator(range(5), per_page=2)
    with pytest.raises(NoSuchPage, match="page 4 of 3"):
        pages.page(4)
    with pytest.raises(NoSuchPage):
        pages.page(0)


def test_page_of_an_item():
    pages = Paginator(range(25), per_page=10)
    assert [pages.page_of(index) for index in (0, 9, 10, 24)] == [1, 1, 2, 3]
    with pytest.raises(IndexError):
        pages.page_of(25)


@pytest.mark.parametrize("arguments", [{"per_page": 0}, {"orphans": -1}, {"per_page": 3, "orphans": 3}])
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError):
        Paginator([], **arguments)
