"""The trees that recipes start from: a Python package with tests, a C project, a node project and git histories."""

from __future__ import annotations

from .model import Tree

SHOP = {
    "shop/__init__.py": '"""A small shop."""\n',
    "shop/pricing.py": '''"""Prices in cents."""

RATES = {"de": 19, "fr": 20}


def tax(cents, country):
    rate = RATES[country]
    return cents * rate // 100


def discount(cents, percent):
    if percent > 100:
        raise ValueError(f"percent out of range: {percent}")
    return cents - cents * percent // 100
''',
    "shop/cart.py": """from shop.pricing import discount, tax


class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, cents, count=1):
        self.items.append((name, cents, count))

    def total(self, country="de"):
        net = sum(cents * count for _, cents, count in self.items)
        return net + tax(net, country)

    def reduced(self, percent):
        return discount(self.total(), percent)
""",
    "tests/test_pricing.py": """import pytest

from shop.pricing import discount, tax


@pytest.mark.parametrize("cents, expected", [(100, 19), (200, 38), (1000, 190)])
def test_tax(cents, expected):
    assert tax(cents, "de") == expected


def test_discount():
    assert discount(200, 50) == 100
""",
    "tests/test_cart.py": """from shop.cart import Cart


class TestCart:
    def test_total(self):
        cart = Cart()
        cart.add("pen", 100, 2)
        assert cart.total() == 238

    def test_empty(self):
        assert Cart().total() == 0
""",
    "README.md": "# shop\n\nRun `python3 -m pytest`. ERROR and FAILED lines are explained in docs/errors.md.\n",
    "config.json": '{"name": "shop", "version": 3, "tags": ["a", "b"]}\n',
    "notes.txt": "alpha\nbeta\ngamma\n",
    "old_run.log": """collected 4 items

tests/test_cart.py .F                                                    [ 50%]
tests/test_pricing.py ..                                                 [100%]

=================================== FAILURES ===================================
Traceback (most recent call last):
  File "tests/test_cart.py", line 8, in test_total
ModuleNotFoundError: No module named 'shop'
=========================== short test summary info ============================
FAILED tests/test_cart.py::TestCart::test_total - assert 3 == 4
========================= 1 failed, 3 passed in 0.12s ==========================
""",
    "server.log": """2024-05-01 10:00:00 INFO start
2024-05-01 10:00:01 ERROR db: connection refused
2024-05-01 10:00:02 ERROR Traceback (most recent call last):
2024-05-01 10:00:02 ERROR   File "/srv/app/db.py", line 31, in connect
2024-05-01 10:00:02 ERROR PermissionError: [Errno 13] Permission denied: '/var/run/db.sock'
2024-05-01 10:00:03 FATAL segmentation fault (core dumped)
2024-05-01 10:00:04 INFO stop
""",
}

CPROJ = {
    "Makefile": """CC = gcc
CFLAGS = -Wall -O1 -Iinclude
OBJS = build/main.o build/stack.o

all: build/app

build/app: $(OBJS)
\t$(CC) -o $@ $(OBJS)

build/%.o: src/%.c include/stack.h
\t@mkdir -p build
\t$(CC) $(CFLAGS) -c -o $@ $<

test: all
\t./build/app

clean:
\trm -rf build
""",
    "include/stack.h": """#ifndef STACK_H
#define STACK_H
struct stack { int top; int data[8]; };
void push(struct stack *s, int value);
int pop(struct stack *s);
#endif
""",
    "src/stack.c": """#include "stack.h"

void push(struct stack *s, int value) {
    s->data[s->top++] = value;
}

int pop(struct stack *s) {
    return s->data[--s->top];
}
""",
    "src/main.c": """#include <stdio.h>
#include "stack.h"

int main(void) {
    struct stack s = {0};
    push(&s, 41);
    push(&s, 42);
    printf("%d\\n", pop(&s));
    return 0;
}
""",
}

WEB = {
    "package.json": '{"name": "web", "version": "1.0.0", "scripts": {"test": "node test.js"}}\n',
    "lib/sum.js": "module.exports = function sum(list) {\n  return list.reduce((a, b) => a + b, 0);\n};\n",
    "index.js": "const sum = require('./lib/sum');\nconsole.log(sum([1, 2, 3]));\n",
}

REPO_SETUP = """set -e
git init -q .
printf 'one\\ntwo\\nthree\\nfour\\nfive\\n' > poem.txt
printf 'def area(w, h):\\n    return w * h\\n' > geo.py
git add . && git commit -qm 'first'
git checkout -qb feature
sed -i 's/two/TWO from feature/' poem.txt
git commit -qam 'feature edit'
git checkout -q main
sed -i 's/two/2 from main/' poem.txt
git commit -qam 'main edit'
git tag v1
"""

TREES: dict[str, Tree] = {
    "none": Tree(),
    "shop": Tree(files=SHOP),
    "c": Tree(files=CPROJ),
    "web": Tree(files=WEB),
    "repo": Tree(setup=REPO_SETUP),
}
