from errata_verify import check, json_file, require, sha256

SUMMARY = {'Ben, Co.': {'orders': 18, 'paid_cents': 452443, 'cancelled': 4}, 'Çelik "Bros"': {'orders': 22, 'paid_cents': 556764, 'cancelled': 6}, 'Dora': {'orders': 19, 'paid_cents': 785958, 'cancelled': 4}, 'Ana Ruiz': {'orders': 11, 'paid_cents': 491031, 'cancelled': 2}}

ORDERS = "de7cb83b6c6237465209d3ff23068ebb031196aa78e2746cf816f5d6c972aa97"


@require
def the_orders_are_as_they_were():
    assert sha256("orders.csv") == ORDERS


def column(key):
    summary = json_file("summary.json")
    assert isinstance(summary, dict), "summary.json is no object"
    assert set(summary) == set(SUMMARY), f"customers: {sorted(summary)}"
    for name, wanted in SUMMARY.items():
        assert isinstance(summary[name], dict), name
        value = summary[name].get(key)
        assert type(value) is int and value == wanted[key], f"{name}: {key} is {value!r}"


@check()
def orders_are_counted():
    column("orders")


@check(weight=2, needs=[orders_are_counted])
def paid_orders_are_summed():
    column("paid_cents")


@check(needs=[orders_are_counted])
def cancelled_orders_are_counted():

    column("cancelled")
