import pytest

from routetable import Request, Response, RouteTable


@pytest.fixture
def table():
    table = RouteTable()

    @table.route("/items")
    def items(request):
        return Response(200, "all items")

    @table.route("/items", methods=["POST"])
    def add(request):
        return Response(201, request.body)

    @table.route("/items/<int:number>", methods=["GET", "DELETE"])
    def item(request, number):
        return Response(200, f"{request.method} {number + 1}")

    @table.route("/items/<word:name>", methods=["PUT"])
    def named(request, name):
        return Response(200, name)

    return table


def test_the_first_route_that_fits_answers(table):
    assert table.handle(Request("GET", "/items")).body == "all items"
    assert table.handle(Request("POST", "/items", "new")).status == 201


def test_variables_are_converted(table):
    assert table.handle(Request("DELETE", "/items/7")).body == "DELETE 8"


def test_a_path_of_no_route_is_not_found(table):
    for path in ("/", "/items/", "/items/7/x", "/items/%"):
        assert table.handle(Request("GET", path)).status == 404


def test_a_response_knows_its_length(table):
    assert table.handle(Request("GET", "/items")).headers["Content-Length"] == "9"
