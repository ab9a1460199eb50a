"""Turns of agents on repositories of SWE-bench: real trees with a small defect, and the runners of those projects.

The trees are what ``errata swe prepare`` builds from the package index; see the README beside this folder. Labels were
written before any detector was run on the outputs.
"""

from __future__ import annotations

from .model import WHOLE, Recipe, Site, Tree, row

SYMPY_TEST = """#!/usr/bin/env python
import sys

import sympy

sys.exit(0 if sympy.test(*sys.argv[1:], subprocess=False) else 1)
"""
"""What ``bin/test`` of a SymPy checkout does; source archives have no ``bin/test``."""
SYMPY_DOCTEST = SYMPY_TEST.replace("sympy.test(", "sympy.doctest(")

TREES = {
    "flask": Tree(root="flask-2.2"),
    "flask-2.0": Tree(root="flask-2.0"),
    "pytest": Tree(root="pytest-6.2"),
    "seaborn": Tree(root="seaborn-0.12"),
    "django": Tree(root="django"),
    "sympy": Tree(root="sympy", files={"bin/test": SYMPY_TEST, "bin/doctest": SYMPY_DOCTEST}),
    "requests": Tree(root="requests"),
}


def swe(
    tree: str,
    command: str,
    kind: str | None,
    *sites: Site,
    setup: str = "",
    files: dict[str, str] | None = None,
    limit_s: float = 60,
    also: tuple[str, ...] = (),
) -> Recipe:
    """Build a recipe in the repository of a tree."""
    return row(command, kind, *sites, tree=tree, files=files, setup=setup, cwd="/testbed", limit_s=limit_s, also=also)


def change(file: str, old: str, new: str) -> str:
    """Return the shell command that replaces a text of a file, which must be there."""
    code = (
        "import io, sys; f, a, b = sys.argv[1:]; s = io.open(f, encoding='utf-8').read(); assert a in s, a; "
        "io.open(f, 'w', encoding='utf-8').write(s.replace(a, b, 1))"
    )
    quoted = " ".join("'" + text.replace("'", "'\\''") + "'" for text in (file, old, new))
    return f'python -c "{code}" {quoted}'


CONFIG, SKIPPING, REGRESSION = "src/flask/config.py", "src/_pytest/skipping.py", "seaborn/_stats/regression.py"
TEXT, FACTOR, POINT = "django/utils/text.py", "sympy/ntheory/factor_.py", "sympy/geometry/point.py"
TEST_CONFIG, TEST_TEXT = "tests/test_config.py", "tests/utils_tests/test_text.py"
TEST_FACTOR = "sympy/ntheory/tests/test_factor_.py"
TEST_REGRESSION = "tests/_stats/test_regression.py"
NO_COLON = change(
    CONFIG,
    'silent: bool = False) -> bool:\n        """Updates the values in the config from a Python',
    'silent: bool = False) -> bool\n        """Updates the values in the config from a Python',
)
MISSPELT = change(CONFIG, "current[tail] = value", "current[tail] = vaule")
FLAT = change(CONFIG, "current[tail] = value", "current[key] = value")
SLUG = change(TEXT, "return re.sub(r'[-\\s]+', '-', value)", "return re.sub(r'[-\\s]+', '_', value)")
SLUG_NAME = change(TEXT, "return re.sub(r'[-\\s]+', '-', value)", "return re.sub(r'[-\\s]+', '-', vlaue)")
LOW_BYTE = change(FACTOR, "return small_trailing[low_byte]", "return small_trailing[low_byte] + 1")
LOW_NAME = change(FACTOR, "return small_trailing[low_byte]", "return small_trailing[lowbyte]")

HUNK = """--- a/src/flask/config.py
+++ b/src/flask/config.py
@@ -1,5 +1,6 @@
 import errno
 import json
+import io
 import os
 import types
 import typing as t
@@ -181,7 +182,7 @@
         d = types.ModuleType("config")
         d.__file__ = filename
         try:
-            with open(filename, "rb") as config_file:
+            with open(filename, mode) as config_file:
                 exec(compile(config_file.read(), filename, "exec"), d.__dict__)
         except OSError as e:
             if silent and e.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR):
"""
CUT = HUNK.replace("         except OSError as e:\n", "").replace("             if silent and e", " e")

FLASK: list[Recipe] = [
    swe(
        "flask",
        "pytest -rA tests/test_config.py",
        "syntax_error",
        Site(file=CONFIG, at="def from_pyfile"),
        setup=NO_COLON,
    ),
    swe(
        "flask",
        "python -c 'import flask; print(flask.__version__)'",
        "syntax_error",
        Site(file=CONFIG, at="def from_pyfile"),
        setup=NO_COLON,
    ),
    swe(
        "flask",
        "pytest -rA tests/test_config.py",
        "test_failure",
        Site(file=CONFIG, at="vaule", test=f"{TEST_CONFIG}::test_from_prefixed_env_nested"),
        setup=MISSPELT,
    ),
    swe(
        "flask",
        "cd /testbed && python -m pytest tests/test_config.py -x -q --no-header 2>&1 | tail -20",
        "test_failure",
        Site(file=CONFIG, at="vaule", test=f"{TEST_CONFIG}::test_from_prefixed_env_nested"),
        setup=MISSPELT,
    ),
    swe(
        "flask",
        "pytest tests/test_config.py -k prefixed",
        "test_failure",
        Site(file=TEST_CONFIG, line=82, test=f"{TEST_CONFIG}::test_from_prefixed_env_nested"),
        setup=FLAT,
    ),
    swe(
        "flask",
        "pytest -q --tb=short tests/test_config.py tests/test_basic.py",
        "test_failure",
        Site(file=TEST_CONFIG, line=82, test=f"{TEST_CONFIG}::test_from_prefixed_env_nested"),
        setup=FLAT,
    ),
    swe(
        "flask",
        "pytest tests/test_config.py",
        "import_error",
        Site(file=CONFIG, at="from werkzeug.util import"),
        setup=change(CONFIG, "from werkzeug.utils import import_string", "from werkzeug.util import import_string"),
    ),
    swe(
        "flask",
        "pytest -rA tests/test_config.py",
        "import_error",
        Site(file=TEST_CONFIG, at="import from_toml"),
        setup=change(TEST_CONFIG, "import flask\n", "import flask\nfrom flask.config import from_toml\n"),
    ),
    swe("flask", "pytest -rA tests/test_configs.py", "path_not_found", Site(span="tests/test_configs.py")),
    swe(
        "flask",
        "pytest -rA tests/test_config.py::test_config_from_toml",
        "path_not_found",
        Site(span="tests/test_config.py::test_config_from_toml"),
    ),
    swe("flask", "git apply fix.patch", "patch_failed", Site(file=CONFIG, line=181), files={"fix.patch": HUNK}),
    swe(
        "flask",
        "patch -p1 < fix.patch",
        "patch_failed",
        Site(file=CONFIG, line=182),
        Site(file=CONFIG, line=181),
        files={"fix.patch": HUNK},
    ),
    swe(
        "flask",
        "git apply --verbose fix.patch && pytest -q tests/test_config.py",
        "patch_failed",
        Site(span="fix.patch", line=18),
        files={"fix.patch": CUT},
    ),
    swe(
        "flask",
        f"git apply <<'EOF'\n{HUNK.replace('config.py', 'configs.py')}EOF",
        "patch_failed",
        Site(file="src/flask/configs.py"),
    ),
    swe("flask", "sed -n '160,200p' src/flask/configs.py", "path_not_found", Site(span="src/flask/configs.py")),
    swe(
        "flask",
        "timeout 4 pytest -x tests/test_config.py",
        "timeout",
        Site(span=WHOLE),
        setup=change(
            CONFIG,
            "            for part in parts:\n",
            "            while True:\n                pass\n            for part in parts:\n",
        ),
    ),
    swe(
        "flask",
        "pytest -x tests/test_config.py",
        "timeout",
        Site(span=WHOLE),
        limit_s=4,
        setup=change(
            CONFIG,
            "            for part in parts:\n",
            "            while True:\n                pass\n            for part in parts:\n",
        ),
    ),
    swe(
        "flask",
        "pytest -q tests/test_config.py::test_mode",
        "test_failure",
        Site(file=TEST_CONFIG, at="def test_mode", test=f"{TEST_CONFIG}::test_mode"),
        setup=f"printf '\\n\\ndef test_mode(applicaton):\\n    assert applicaton.config\\n' >> {TEST_CONFIG}",
    ),
    swe(
        "flask",
        "python repro.py",
        "runtime_error",
        Site(file=CONFIG, at="vaule"),
        setup=MISSPELT,
        files={
            "repro.py": "import os\n\nimport flask\n\nos.environ['FLASK_A__B'] = '1'\napp = flask.Flask('a')\n"
            "app.config.from_prefixed_env()\nprint(app.config['A'])\n"
        },
    ),
    swe(
        "flask",
        "python - <<'EOF'\nimport json\nimport flask\n\napp = flask.Flask('demo')\n"
        "app.config.from_file('settings.toml', load=json.load)\nEOF",
        "path_not_found",
        Site(span="settings.toml"),
    ),
    swe(
        "flask", "pytest -rA tests/test_config.py --no-such-option", "invalid_arguments", Site(span="--no-such-option")
    ),
    swe(
        "flask",
        "python -m pytest tests/test_config.py 2>&1 | tail -4",
        "test_failure",
        Site(test=f"{TEST_CONFIG}::test_from_prefixed_env_nested"),
        setup=MISSPELT,
    ),
    swe(
        "flask",
        "flask --app nosuch routes",
        "invalid_arguments",
        Site(span="nosuch"),
        also=("import_error", "nonzero_exit"),
    ),
    swe(
        "flask",
        "python -c 'import flask; app = flask.Flask(__name__); app.config.from_object(\"nosuch.config\")'",
        "import_error",
        Site(file=CONFIG, at="obj = import_string(obj)"),
    ),
    swe(
        "flask-2.0",
        "pytest -rA tests/test_blueprints.py -k dotted_code",
        "test_failure",
        Site(
            file="src/flask/testing.py",
            at="url = url_parse(path)",
            test="tests/test_blueprints.py::test_dotted_code",
        ),
        setup='printf \'\\n\\ndef test_dotted_code(client):\\n    rv = client.get("/nowhere")\\n'
        "    assert rv.status_code == 201\\n' >> tests/test_blueprints.py",
    ),
]

DJANGO: list[Recipe] = [
    swe(
        "django",
        "cd tests && ./runtests.py utils_tests.test_text --parallel 1",
        "test_failure",
        Site(file=TEST_TEXT, line=201, test="utils_tests.test_text.TestUtilsText.test_slugify"),
        setup=SLUG,
    ),
    swe(
        "django",
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 utils_tests.test_text",
        "test_failure",
        Site(file=TEXT, at="vlaue", test="utils_tests.test_text.TestUtilsText.test_slugify"),
        setup=SLUG_NAME,
    ),
    swe(
        "django",
        "python tests/runtests.py utils_tests.test_text 2>&1 | tail -30; exit ${PIPESTATUS[0]}",
        "test_failure",
        Site(file=TEXT, at="vlaue", test="utils_tests.test_text.TestUtilsText.test_slugify"),
        setup=SLUG_NAME,
    ),
    swe(
        "django",
        "./tests/runtests.py utils_tests",
        "syntax_error",
        Site(file=TEXT, at="def slugify"),
        setup=change(TEXT, "def slugify(value, allow_unicode=False):", "def slugify(value, allow_unicode=False)"),
    ),
    swe(
        "django",
        "cd tests && python runtests.py utils_tests.test_texts",
        "import_error",
        Site(span="utils_tests.test_texts"),
    ),
    swe(
        "django",
        "./tests/runtests.py utils_tests.test_text --parallel=1",
        "import_error",
        Site(file=TEST_TEXT, at="import slugfy"),
        setup=change(
            TEST_TEXT,
            "from django.utils import text\n",
            "from django.utils import text\nfrom django.utils.text import slugfy\n",
        ),
    ),
    swe(
        "django",
        "./tests/runtests.py utils_tests.test_text.TestUtilsText.test_slug",
        "test_failure",
        also=("import_error", "path_not_found", "runtime_error"),
    ),
    swe("django", "python manage.py migrate", "path_not_found", Site(span="manage.py")),
    swe(
        "django",
        'python -c "from django.conf import settings; print(settings.DEBUG)"',
        "runtime_error",
        Site(file="django/conf/__init__.py", line=61),
    ),
    swe(
        "django",
        "./tests/runtests.py --settings=test_postgres utils_tests",
        "import_error",
        Site(file="django/conf/__init__.py", at="mod = importlib.import_module(self.SETTINGS_MODULE)"),
    ),
    swe(
        "django",
        "./tests/runtests.py forms_tests.field_tests.test_charfield utils_tests.test_text --parallel=1 --failfast",
        "test_failure",
        Site(file=TEXT, at="vlaue", test="utils_tests.test_text.TestUtilsText.test_slugify"),
        setup=SLUG_NAME,
    ),
    swe(
        "django",
        "cd tests && ./runtests.py basic.tests.ModelTest 2>&1",
        "runtime_error",
        Site(file="django/db/models/base.py", at="self.saved_att"),
        setup=change(
            "django/db/models/base.py",
            "    def save(self, force_insert=False",
            "    def save_checked(self):\n        return self.saved_att\n\n    def save(self, force_insert=False",
        )
        + " && "
        + change(
            "django/db/models/base.py",
            "        # Ensure that a model instance without a PK hasn't been assigned to",
            "        self.save_checked()\n        # Ensure that a model instance without a PK hasn't been assigned to",
        ),
    ),
]

SYMPY: list[Recipe] = [
    swe(
        "sympy",
        "bin/test sympy/ntheory/tests/test_factor_.py",
        "timeout",
        Site(span=WHOLE),
        setup=LOW_BYTE,
        limit_s=10,
    ),
    swe(
        "sympy",
        "PYTHONWARNINGS=ignore bin/test sympy/ntheory/tests/test_factor_.py",
        "test_failure",
        Site(file=FACTOR, at="[lowbyte]", test=f"{TEST_FACTOR}:test_trailing_bitcount"),
        setup=LOW_NAME,
    ),
    swe(
        "sympy",
        "bin/test sympy/geometry/tests/test_point.py",
        "syntax_error",
        Site(file=POINT, at="def dot(self, p)"),
        setup=change(POINT, "    def dot(self, p):", "    def dot(self, p)"),
    ),
    swe(
        "sympy",
        "bin/test sympy/geometry/tests/test_point.py",
        "import_error",
        Site(file=POINT, at="import Matrices"),
        setup=change(POINT, "from sympy.matrices import Matrix\n", "from sympy.matrices import Matrices\n"),
    ),
    swe(
        "sympy",
        "bin/test sympy/ntheory/tests/test_factor_.py",
        "import_error",
        Site(file=TEST_FACTOR, at="import primes_of"),
        setup=f"sed -i '1i from sympy.ntheory.factor_ import primes_of' {TEST_FACTOR}",
    ),
    swe(
        "sympy",
        'python -c "from sympy import trailing; print(trailing(12))"',
        "runtime_error",
        Site(file=FACTOR, at="[lowbyte]"),
        setup=LOW_NAME,
    ),
    swe(
        "sympy",
        "bin/doctest sympy/ntheory/factor_.py",
        "test_failure",
        Site(file=FACTOR, line=180, test="sympy.ntheory.factor_.trailing"),
        setup=change(FACTOR, "    >>> trailing(63)\n    0\n", "    >>> trailing(63)\n    1\n"),
    ),
    swe("sympy", "python -m pytest -q sympy/geometry/tests/test_point.py", "import_error", Site(span="pytest")),
    swe("sympy", "bin/test sympy/core/tests/test_nosuch.py && echo fine", None),
]

PYTEST: list[Recipe] = [
    swe(
        "pytest",
        "pytest -rA testing/test_skipping.py",
        "syntax_error",
        Site(file=SKIPPING, at="reason = unconditional skip"),
        setup=change(SKIPPING, '            reason = "unconditional skip"', "            reason = unconditional skip"),
    ),
    swe(
        "pytest",
        "python -m pytest -rA testing/test_skipping.py -k 'TestSkip and no_reason'",
        "test_failure",
        Site(file="testing/test_skipping.py", test="testing/test_skipping.py::TestSkip::test_skip_no_reason"),
        setup=change(SKIPPING, 'reason = "unconditional skip"', 'reason = "skipped"'),
    ),
    swe(
        "pytest",
        "pytest testing/test_skipping.py -q -x",
        "test_failure",
        Site(file=SKIPPING, at="item._stores", test="testing/test_skipping.py::test_importorskip"),
        setup=change(
            SKIPPING,
            "    yield\n\n    # The test run may have",
            "    yield\n    item._stores[xfailed_key] = None\n\n    # The test run may have",
        ),
    ),
    swe(
        "pytest",
        "pytest testing/test_skipping.py -q",
        "runtime_error",
        Site(file=SKIPPING, at="outcome.get_results()"),
        setup=change(
            SKIPPING, "    rep = outcome.get_result()\n    xfailed", "    rep = outcome.get_results()\n    xfailed"
        ),
    ),
]

SEABORN: list[Recipe] = [
    swe(
        "seaborn",
        "MPLBACKEND=Agg pytest --no-header -rA tests/_stats/test_regression.py",
        "test_failure",
        Site(file=TEST_REGRESSION, line=33, test=f"{TEST_REGRESSION}::TestPolyFit::test_no_grouper"),
        setup=change(
            REGRESSION,
            "np.linspace(x.min(), x.max(), self.gridsize)",
            "np.linspace(x.min(), x.max() + 1, self.gridsize)",
        ),
    ),
    swe(
        "seaborn",
        "MPLBACKEND=Agg pytest -q tests/_stats",
        "import_error",
        Site(file=REGRESSION, at="_stats.bases"),
        setup=change(REGRESSION, "from seaborn._stats.base import Stat", "from seaborn._stats.bases import Stat"),
    ),
    swe(
        "seaborn",
        "MPLBACKEND=Agg python -m pytest -x --tb=native tests/_stats/test_regression.py",
        "test_failure",
        Site(file=REGRESSION, at='data["z"]', test=f"{TEST_REGRESSION}::TestPolyFit::test_no_grouper"),
        setup=change(REGRESSION, 'y = data["y"]', 'y = data["z"]'),
    ),
    swe("seaborn", "MPLBACKEND=Agg python -c \"import seaborn as sns; sns.load_dataset('tips')\"", "policy_violation"),
    swe(
        "seaborn",
        "MPLBACKEND=Agg python - <<'EOF'\nimport numpy as np\nimport pandas as pd\nfrom seaborn import regplot\n\n"
        "regplot(data=pd.DataFrame({'a': [1, 2]}), x='a', y='b')\nEOF",
        "runtime_error",
        Site(file="seaborn/regression.py", at="vector = data[val]"),
    ),
]

REQUESTS: list[Recipe] = [
    swe(
        "requests",
        "pytest -q test_requests.py -k DIGEST_STREAM -W ignore",
        "policy_violation",
        also=("test_failure",),
    ),
    swe(
        "requests",
        "python -c \"import requests; print(requests.get('http://httpbin.org/get').status_code)\"",
        "policy_violation",
        Site(span="http://httpbin.org/get"),
        Site(span="httpbin.org"),
    ),
    swe(
        "requests",
        "pytest -rA test_requests.py::RequestsTestCase::test_basic_building",
        "test_failure",
        Site(
            file="requests/models.py",
            at="self.prepare_urls",
            test="test_requests.py::RequestsTestCase::test_basic_building",
        ),
        setup=change("requests/models.py", "self.prepare_url(url, params)", "self.prepare_urls(url, params)"),
    ),
    swe("requests", "grep -n 'def prepare_url' requests/model.py", "path_not_found", Site(span="requests/model.py")),
]

MORE: list[Recipe] = [
    swe(
        "sympy",
        "bin/test sympy/geometry/tests/test_point.py",
        "test_failure",
        Site(file="sympy/geometry/tests/test_point.py", line=41, test="sympy/geometry/tests/test_point.py:test_point"),
        setup=change(POINT, "return sqrt(Add(*((a - b)**2", "return sqrt(Add(*((a + b)**2"),
    ),
    swe(
        "sympy",
        "python bin/test sympy/geometry/tests/test_point.py 2>&1 | tail -n 40; exit ${PIPESTATUS[0]}",
        "test_failure",
        Site(file=POINT, at="coordinates = nsimplyfy"),
        setup=change(POINT, "coords = Tuple(*coords)", "coordinates = nsimplyfy(coords)"),
    ),
    swe(
        "pytest",
        "git checkout 7.0.x -- src/_pytest/skipping.py",
        "invalid_arguments",
        Site(span="7.0.x"),
        also=("path_not_found", "nonzero_exit"),
    ),
    swe(
        "pytest",
        "python -m pytest testing/test_skipping.py -n 4",
        "invalid_arguments",
        Site(span="-n"),
        Site(span="-n 4"),
    ),
    swe(
        "pytest",
        "cat testing/test_skiping.py | head -20; sed -n '1,5p' src/_pytest/skiping.py",
        "path_not_found",
        Site(span="src/_pytest/skiping.py"),
    ),
    swe("flask", "pip install tomli", "policy_violation"),
    swe(
        "django",
        "cd django && git apply --check ../fix.diff",
        "patch_failed",
        Site(span="../fix.diff"),
        files={"fix.diff": "Here is the fix:\n\n-    return 1\n+    return 2\n"},
    ),
    swe(
        "seaborn",
        "MPLBACKEND=Agg python examples/show.py",
        "runtime_error",
        Site(file="examples/show.py", at="Line(colour"),
        files={
            "examples/show.py": "import seaborn.objects as so\nimport pandas as pd\n\n"
            "data = pd.DataFrame({'a': [1, 2], 'b': [3, 4]})\n"
            "plot = so.Plot(data, x='a', y='b').add(so.Line(colour='r'))\nplot.save('out.png')\n"
        },
    ),
    swe(
        "django",
        "cd tests && python -m unittest utils_tests.test_text -v",
        "test_failure",
        Site(file="django/conf/__init__.py", line=61),
        also=("runtime_error",),
    ),
    swe("django", "tests/runtests.py utils_tests.test_text 2>&1 | tail -3", None, setup=SLUG),
    swe("flask", "grep -rn 'def from_tomlfile' src/flask", None),
]

RECIPES = [*FLASK, *DJANGO, *SYMPY, *PYTEST, *SEABORN, *REQUESTS, *MORE]
