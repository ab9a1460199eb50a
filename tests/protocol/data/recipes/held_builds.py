"""Second recording, builds: C++ in several files, make -j, cmake, headers, linkers, recipes that fail otherwise."""

from __future__ import annotations

from .held_tests import led
from .model import Recipe, Site

SQUARE = "sed -i 's/return a \\* a/return a * b/' src/square.cpp"
HEADER = "sed -i 's/^#include <string>$//' include/shape.hpp"
NO_SQUARE = "sed -i '/^Shape .square/d' src/square.cpp"

RECIPES: list[Recipe] = [
    led("make -j4", "build_error", Site(file="src/square.cpp", at="a * b"), tree="cpp", setup=SQUARE),
    led(
        "make -j3 -k 2>&1 | cat; exit ${PIPESTATUS[0]}",
        "build_error",
        Site(file="src/square.cpp", at="a * b"),
        tree="cpp",
        setup=SQUARE,
    ),
    led(
        "make src/circle.o",
        "build_error",
        Site(file="include/shape.hpp", at="std::string name"),
        tree="cpp",
        setup=HEADER,
    ),
    led(
        "cmake -S . -B build >/dev/null && cmake --build build -j2 2>&1",
        "build_error",
        Site(file="src/square.cpp", at="a * b"),
        tree="cpp",
        setup=SQUARE,
    ),
    led(
        "mkdir -p out && cd out && cmake .. > cmake.log && make",
        "build_error",
        Site(file="src/square.cpp", at="a * b"),
        tree="cpp",
        setup=SQUARE,
    ),
    led(
        "cmake -B out",
        "build_error",
        Site(file="CMakeLists.txt", at="add_executable"),
        tree="cpp",
        setup="sed -i 's/square.cpp/quad.cpp/' CMakeLists.txt",
    ),
    led(
        "cmake -S . -B b2",
        "build_error",
        Site(file="CMakeLists.txt", at="find_package"),
        Site(file="/usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake", line=230),
        tree="cpp",
        setup="sed -i '3i find_package(Boost 1.70 REQUIRED)' CMakeLists.txt",
    ),
    led("cmake -G Ninja -S . -B b3", "build_error", tree="cpp", also=("nonzero_exit",)),
    led(
        "g++ -g -Iinclude src/*.cpp -o /tmp/shapes",
        "build_error",
        Site(file="src/main.cpp", at="square(2)"),
        tree="cpp",
        setup=NO_SQUARE,
    ),
    led(
        "make 2>&1 | grep -E 'error|undefined' | head -3; exit ${PIPESTATUS[0]}",
        "build_error",
        tree="cpp",
        setup=SQUARE,
    ),
    led("make check", "build_error", Site(file="Makefile", line=11), tree="cpp"),
    led("make && ./shapes --json | jq .", "syntax_error", tree="cpp"),
    led(
        "g++ -std=c++17 -Wall -Wextra -Werror -Iinclude -c src/main.cpp -o /tmp/m.o",
        "build_error",
        Site(file="src/main.cpp", at="int spare"),
        tree="cpp",
        setup="sed -i 's/^int main() {/&\\n  int spare = 1;/' src/main.cpp",
    ),
    led(
        "g++ -std=c++17 -Iinclude -fmax-errors=1 -fsyntax-only src/main.cpp src/list.cpp",
        "build_error",
        Site(file="src/list.cpp", at="names.push_bak"),
        tree="cpp",
        files={
            "src/list.cpp": "#include <vector>\n#include <string>\n\nvoid fill(std::vector<std::string> &names) {\n"
            '  names.push_bak("a");\n}\n'
        },
    ),
    led(
        "for f in src/*.cpp; do g++ -Iinclude -c $f -o /dev/null || exit 1; done",
        "build_error",
        Site(file="src/square.cpp", at="a * b"),
        tree="cpp",
        setup=SQUARE,
    ),
    led("g++ -Iinclude src/main.cpp -o shapes 2>&1 | tail -2; exit ${PIPESTATUS[0]}", "build_error", tree="cpp"),
    led("make docs", None),  # there is a directory of that name
    led("make html", "build_error", Site(file="Makefile", line=17)),
    led("make lint", "build_error", Site(file="Makefile", line=14), Site(file="Makefile", line=13)),
    led(
        "make check",
        "build_error",
        Site(file="Makefile", line=7),
        Site(file="scripts/ratio.py", at="done / total"),
        also=("runtime_error",),
    ),
    led("make --directory=native", "build_error", tree="cpp", also=("path_not_found",)),
    led("make -C src", "build_error", tree="cpp"),
    led(
        "gcc -o app main.c -lm 2>&1",
        "build_error",
        Site(file="main.c", at="return total"),
        tree="none",
        files={
            "main.c": "#include <stdio.h>\n\nint sum(int n) {\n  int totl = n;\n  return total;\n}\n\n"
            'int main(void) {\n  printf("%d\\n", sum(3)\n  return 0;\n}\n'
        },
    ),
    led(
        "gcc -o grow grow.c && ./grow",
        "runtime_error",
        tree="none",
        files={
            "grow.c": "#include <stdlib.h>\n\nint main(void) {\n  char *p = malloc(8);\n  free(p);\n  free(p);\n"
            "  return 0;\n}\n"
        },
    ),
    led(
        "g++ -o alloc alloc.cpp && (ulimit -v 200000; ./alloc)",
        "resource_limit",
        tree="none",
        also=("runtime_error",),
        files={"alloc.cpp": "#include <vector>\nint main() { std::vector<char> v(1UL << 40); return v[0]; }\n"},
    ),
    led(
        "bash run.sh",
        "runtime_error",
        tree="none",
        files={
            "run.sh": "gcc -o /tmp/null null.c 2>/dev/null\necho running\n/tmp/null\n",
            "null.c": "int main(void) { volatile int *p = 0; return *p; }\n",
        },
    ),
    # nothing to mark
    led("make 2>&1 | tail -3", None, tree="cpp", setup=SQUARE),
    led("make -j2 && ./shapes && make clean", None, tree="cpp"),
    led("./shapes 2>/dev/null || echo 'no binary yet'; make -n shapes | head -2", None, tree="cpp"),
    led("g++ -Iinclude -Wall -c src/circle.cpp -o /tmp/c.o 2>&1 | grep -c 'error:'", None, tree="cpp"),
    led("make && ./shapes | diff - expected.txt", None, tree="cpp"),
]
