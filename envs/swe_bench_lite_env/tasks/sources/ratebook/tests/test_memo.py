from ratebook.memo import memoized


class Counted:
    def __init__(self):
        self.calls = 0

    @memoized
    def twice(self, number):
        self.calls += 1
        return 2 * number


def test_a_value_is_computed_once():
    counted = Counted()
    assert [counted.twice(2), counted.twice(2), counted.twice(3)] == [4, 4, 6]
    assert counted.calls == 2
