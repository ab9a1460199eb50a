"""gcc, g++, make and cmake runs that fail."""

from __future__ import annotations

from .model import Recipe, Site, row

CMAKE = {
    "CMakeLists.txt": "cmake_minimum_required(VERSION 3.16)\nproject(app C)\nadd_executable(app main.c missing.c)\n",
    "main.c": "int main(void) { return 0; }\n",
}

RECIPES: list[Recipe] = [
    row(
        "make -s all",
        "build_error",
        Site(file="src/main.c", at="push(&s, 41)"),
        tree="c",
        setup="sed -i 's/push(&s, 41);/push(\\&s, 41)/' src/main.c",
    ),
    row(
        "make 2>&1 | tail -12; exit ${PIPESTATUS[0]}",
        "build_error",
        Site(file="src/stack.c", at="s->tpo"),
        tree="c",
        setup="sed -i 's/--s->top/--s->tpo/' src/stack.c",
    ),
    row(
        "make CFLAGS='-Wall -Werror -Iinclude'",
        "build_error",
        Site(file="src/main.c", at="int unused"),
        tree="c",
        setup="sed -i '4a\\    int unused;' src/main.c",
    ),
    row(
        "make build/app",
        "build_error",
        tree="c",
        setup="sed -i 's/^int pop.*/int pops(struct stack *s) {/' src/stack.c",
    ),
    row(
        "make -k",
        "build_error",
        Site(file="Makefile", at="    $(CC) -o"),
        tree="c",
        setup="sed -i 's/^\\t\\$(CC) -o/    $(CC) -o/' Makefile; sed -i '1i# build' Makefile",
    ),
    row("make -j2 && ./build/app", "build_error", tree="c", setup="rm include/stack.h"),
    row("make deploy 2>&1", "build_error", Site("deploy"), tree="c"),
    row("make test", "build_error", tree="c", setup="sed -i 's/return 0/return 3/' src/main.c"),
    row("mkdir empty && cd empty && make", "build_error", tree="c"),
    row(
        "g++ -std=c++17 -o /tmp/app app.cpp",
        "build_error",
        Site(file="app.cpp", line=5),
        tree="none",
        files={
            "app.cpp": "#include <string>\n#include <vector>\n\nint main() {\n"
            "    std::vector<std::string> names = {1, 2};\n    return names.size();\n}\n"
        },
    ),
    row(
        "g++ -c shapes.cpp -o /tmp/shapes.o 2>&1 | head -4",
        None,
        tree="none",
        files={"shapes.cpp": "struct A { int x; }\nint main() { A a; return a.y; }\n"},
    ),
    row(
        "cd /workspace && gcc -Wall -Iinclude -o app src/main.c && ./app",
        "build_error",
        tree="c",
    ),
    row(
        "gcc -o app src/*.c",
        "build_error",
        Site(file="src/main.c", line=2),
        tree="c",
    ),
    row("gcc -o app src/maain.c", "build_error", Site("src/maain.c"), tree="c", also=("path_not_found",)),
    row(
        "gcc -std=c42 src/main.c -Iinclude",
        "invalid_arguments",
        Site("-std=c42"),
        Site("c42"),
        tree="c",
        also=("build_error",),
    ),
    row("gcc --frobnicate src/main.c", "invalid_arguments", Site("--frobnicate"), tree="c", also=("build_error",)),
    row("gcc", "invalid_arguments", Site("gcc"), tree="c", also=("build_error",)),
    row("cmake -S . -B build", "build_error", Site(file="CMakeLists.txt", line=3), tree="none", files=CMAKE),
    row(
        "cmake --build out",
        "path_not_found",
        Site("out"),
        tree="none",
        files=CMAKE,
        also=("build_error", "nonzero_exit", "invalid_arguments"),
        ambiguous=True,
    ),
    row(
        "cmake -B build -G Nonsense .",
        "invalid_arguments",
        Site("Nonsense"),
        Site("-G Nonsense"),
        tree="none",
        files=CMAKE,
        also=("build_error", "nonzero_exit"),
    ),
    row(
        "python3 -m mypy shop/typed.py",
        "nonzero_exit",
        Site("python3 -m mypy shop/typed.py"),
        files={"shop/typed.py": "def add(a: int) -> str:\n    return a + 1\n"},
        also=("build_error",),
        ambiguous=True,
    ),  # a checker's findings: the vocabulary has no kind of their own for them
    row(
        "gcc -g crash.c -o /tmp/crash && /tmp/crash; echo after",
        None,
        tree="none",
        files={"crash.c": "int main(void) { int *p = 0; *p = 1; return 0; }\n"},
    ),
    row(
        "gcc -g crash.c -o /tmp/crash 2>/dev/null; /tmp/crash",
        "runtime_error",
        tree="none",
        files={"crash.c": "int main(void) { int *p = 0; *p = 1; return 0; }\n"},
    ),
    row(
        "gcc -fsanitize=undefined -fno-sanitize-recover div.c -o /tmp/div && /tmp/div",
        "runtime_error",
        Site(file="div.c", line=3),
        tree="none",
        files={"div.c": "int main(int argc, char **argv) {\n    int zero = argc - 1;\n    return 1 / zero;\n}\n"},
        also=("nonzero_exit",),
    ),
    row(
        "g++ throw.cpp -o /tmp/throw && /tmp/throw",
        "runtime_error",
        tree="none",
        files={"throw.cpp": '#include <stdexcept>\nint main() { throw std::runtime_error("no device"); }\n'},
    ),
    row(
        "gcc -O0 assert.c -o /tmp/as && /tmp/as",
        "runtime_error",
        tree="none",
        files={"assert.c": "#include <assert.h>\nint main(void) { int n = 3; assert(n < 2); return n; }\n"},
    ),
    row(
        "gcc -Iinclude src/main.c src/stack.c extra.c -o app 2>&1 | tail -20; test ${PIPESTATUS[0]} -eq 0",
        None,
        tree="c",
        files={"extra.c": "int pop(void *s) { return 0; }\n"},
        ambiguous=True,
        also=("build_error",),
    ),
    row(
        "gcc -Iinclude src/main.c src/stack.c extra.c -o app",
        "build_error",
        tree="c",
        files={"extra.c": "int pop(void *s) { return 0; }\n"},
    ),
    row("gcc -Iinclude src/main.c src/stack.c -o app -lnosuchlib", "build_error", tree="c"),
    row(
        "g++ -std=c++20 -fsyntax-only list.cpp",
        "build_error",
        Site(file="list.cpp", line=6),
        tree="none",
        files={
            "list.cpp": "#include <list>\n#include <algorithm>\n\nint main() {\n    std::list<int> l{3, 1};\n"
            "    l.sortt();\n}\n"
        },
    ),
    row(
        "gcc -c outer.c -o /tmp/o.o",
        "build_error",
        Site(file="inner.h", line=1),
        Site(file="outer.c", line=1),
        tree="none",
        files={"outer.c": '#include "inner.h"\nint x;\n', "inner.h": "#include <nosuch/header.h>\n"},
    ),
    row(
        "gcc -c old.c -o /tmp/old.o -Werror=implicit-function-declaration",
        "build_error",
        Site(file="old.c", line=2),
        tree="none",
        files={"old.c": "int main(void) {\n    return helper(1);\n}\n"},
    ),
    row(
        "cmake -S . -B build > /dev/null && cmake --build build",
        "build_error",
        Site(file="main.c", line=2),
        tree="none",
        files={
            "CMakeLists.txt": "cmake_minimum_required(VERSION 3.16)\nproject(app C)\nadd_executable(app main.c)\n",
            "main.c": "int main(void) {\n    return oops;\n}\n",
        },
    ),
    row(
        "make -f rules.mk",
        "build_error",
        Site(file="rules.mk", line=3),
        tree="none",
        files={"rules.mk": "all:\n\t@echo building\n\t@cat nothing.txt\n"},
        also=("path_not_found",),
    ),
    row("make -f build/rules.mk", "build_error", Site("build/rules.mk"), tree="none", also=("path_not_found",)),
    row(
        "make lint",
        "build_error",
        Site(file="Makefile", line=2),
        tree="none",
        files={"Makefile": "lint:\n\teslint src/\n"},
        also=("command_not_found",),
    ),
    row(
        "as -o /tmp/x.o code.s",
        "build_error",
        Site(file="code.s", line=2),
        tree="none",
        files={"code.s": "main:\n    movvq %rax, %rbx\n"},
        also=("nonzero_exit", "syntax_error"),
    ),
    row("ld -o app missing.o", "build_error", Site("missing.o"), tree="none", also=("path_not_found",)),
]
