import contextlib
import sqlite3

from errata_verify import NotSolved, check, data, require

KEPT = [(1, 'ana@example.org', 'Ana'), (2, 'ben@example.org', 'Ben'), (3, 'carla@example.org', 'Carla'), (4, 'dora@example.org', 'Dora'), (5, 'eli@example.org', 'Eli'), (6, 'fay@example.org', 'Fay')]
KEPT_NAMES = [(i, name) for i, _, name in KEPT]
PURCHASES = [(1, 1, 8349), (2, 1, 5313), (3, 3, 7126), (4, 3, 764), (5, 3, 4314), (6, 1, 3878), (7, 3, 338), (8, 6, 7710), (9, 5, 3765), (10, 1, 6303), (11, 4, 1551), (12, 3, 7115), (13, 4, 3813), (14, 6, 3462), (15, 1, 2886), (16, 5, 5511), (17, 5, 236), (18, 2, 6820), (19, 5, 5421), (20, 6, 3427), (21, 4, 7767), (22, 3, 2788), (23, 4, 5163), (24, 3, 2755), (25, 2, 3530), (26, 5, 2232), (27, 5, 6901), (28, 5, 7795), (29, 6, 1852), (30, 1, 1392), (31, 5, 1018), (32, 5, 4370), (33, 5, 5246), (34, 5, 2156), (35, 2, 6885), (36, 6, 7492), (37, 2, 8076), (38, 2, 7989), (39, 5, 5921), (40, 2, 4707), (41, 4, 6527), (42, 3, 7031), (43, 2, 2957), (44, 3, 4634), (45, 1, 4002), (46, 6, 5921), (47, 5, 6958), (48, 6, 5888), (49, 3, 163), (50, 1, 5916), (51, 3, 3377), (52, 2, 5465), (53, 2, 8796), (54, 5, 8771), (55, 1, 4486), (56, 3, 8129), (57, 4, 4158), (58, 3, 8961), (59, 4, 5770), (60, 2, 8106)]


def opened():
    """Open a copy in memory: the file itself may be locked, in WAL mode or not writable here."""
    content = bytearray(data("shop.db"))
    if not content.startswith(b"SQLite format 3\0"):
        raise NotSolved("shop.db is no database")
    if content[18:20] == b"\x02\x02":
        content[18:20] = b"\x01\x01"  # a copy in memory cannot be in WAL mode
    shop = sqlite3.connect(":memory:", isolation_level=None)
    shop.deserialize(bytes(content))
    return shop


def rows(query):
    try:
        with contextlib.closing(opened()) as shop:
            return shop.execute(query).fetchall()
    except sqlite3.Error as error:
        raise NotSolved(f"shop.db: {error}") from error


def entered(email, name):
    """Enter one more customer; return how a unique index refused it, "" where nothing did."""
    try:
        with contextlib.closing(opened()) as shop:
            shop.execute("INSERT INTO customer (id, email, name) VALUES (1000, ?, ?)", (email, name))
            return ""
    except sqlite3.IntegrityError as error:
        if getattr(error, "sqlite_errorname", "SQLITE_CONSTRAINT_UNIQUE") != "SQLITE_CONSTRAINT_UNIQUE":
            raise NotSolved(f"refused, but by no unique index: {error}") from error
        return str(error)
    except sqlite3.Error as error:
        raise NotSolved(f"shop.db: {error}") from error


@require
def no_purchase_is_lost():
    assert sorted(rows("SELECT id, cents FROM purchase")) == [(o, c) for o, _, c in PURCHASES]


@require
def no_purchase_is_an_orphan():
    assert not rows("SELECT id FROM purchase WHERE customer_id NOT IN (SELECT id FROM customer)")


@require
def the_tables_are_tables():
    tables = rows("SELECT name FROM sqlite_master WHERE type = 'table'")
    assert {("customer",), ("purchase",)} <= set(tables), tables


@require
def nobody_is_lost():
    assert set(KEPT_NAMES) <= set(rows("SELECT id, name FROM customer"))


@check()
def purchases_belong_to_the_kept_row():
    assert sorted(rows("SELECT id, customer_id, cents FROM purchase")) == PURCHASES


@check(needs=[purchases_belong_to_the_kept_row])
def one_row_for_each_customer():
    """To delete rows is easy; it is worth something when their purchases were moved before."""
    assert sorted(rows("SELECT id, name FROM customer")) == KEPT_NAMES


@check(weight=0.5, needs=[purchases_belong_to_the_kept_row])
def addresses_have_one_form():
    assert sorted(rows("SELECT id, email, name FROM customer")) == KEPT


@check(weight=0.5, needs=[one_row_for_each_customer])
def a_second_one_is_refused():
    """With the duplicates in it, the table takes such an index at once, because they are spelt differently."""
    for email, _ in rows("SELECT email, name FROM customer"):
        assert entered(email, "Somebody"), f"a second customer with {email!r} is accepted"
    refused = entered("gus@example.org", "Ana")
    assert not refused, f"a new customer is refused: {refused}"
