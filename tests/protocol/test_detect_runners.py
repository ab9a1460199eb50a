"""The detectors on reports of test runners: the first failing test, and a line of its own part of the report only."""

from __future__ import annotations

import pytest

from errata_protocol.detect import detect
from errata_protocol.markers import NOTHING_WRONG, Detection

Place = tuple[str | None, str | None, int | None]
"""Test id, file and line of the site."""


def find(command: str, exit_code: int, stdout: str, stderr: str = "") -> Detection:
    return detect(command, exit_code, stdout, stderr, cwd="/workspace")


def place(found: Detection) -> Place:
    site = found.error_site
    assert site is not None
    return site.test_id, site.file, site.line


GO_VERBOSE = """\
=== RUN   TestAdd
    calc_test.go:8: got 3, want 4
--- FAIL: TestAdd (0.00s)
=== RUN   TestSub
    calc_test.go:15: got 0, want 1
--- FAIL: TestSub (0.00s)
=== RUN   TestMul
--- PASS: TestMul (0.00s)
FAIL
FAIL\texample.com/demo\t0.002s
FAIL
"""
GO_VERBOSE_OTHER_LOGS = """\
=== RUN   TestFirst
    calc_test.go:3: just a log
--- PASS: TestFirst (0.00s)
=== RUN   TestAdd
--- FAIL: TestAdd (0.00s)
=== RUN   TestLog
    calc_test.go:22: just a log
--- PASS: TestLog (0.00s)
FAIL
FAIL\texample.com/demo\t0.002s
FAIL
"""
GO_VERBOSE_SUBTESTS = """\
=== RUN   TestAdd
    calc_test.go:4: table of 3
=== RUN   TestAdd/zero
    calc_test.go:9: zero logged
=== RUN   TestAdd/neg
    calc_test.go:11: got 3
=== RUN   TestAdd/pos
    calc_test.go:22: pos logged
--- FAIL: TestAdd (0.00s)
    --- PASS: TestAdd/zero (0.00s)
    --- FAIL: TestAdd/neg (0.00s)
    --- PASS: TestAdd/pos (0.00s)
FAIL
FAIL\texample.com/demo\t0.002s
"""
GO_VERBOSE_PARALLEL = """\
=== RUN   TestA
=== PAUSE TestA
=== RUN   TestB
=== PAUSE TestB
=== CONT  TestB
    b_test.go:5: B logs
=== CONT  TestA
=== NAME  TestB
    b_test.go:6: B logs again
=== NAME  TestA
    a_test.go:7: A fails
--- PASS: TestB (0.00s)
--- FAIL: TestA (0.00s)
FAIL
FAIL\texample.com/demo\t0.002s
"""
GO_TWO_PACKAGES = """\
=== RUN   TestSame
    one_test.go:3: passes here
--- PASS: TestSame (0.00s)
PASS
ok  \texample.com/one\t0.002s
=== RUN   TestSame
    two_test.go:9: fails here
--- FAIL: TestSame (0.00s)
FAIL
FAIL\texample.com/two\t0.002s
FAIL
"""
GO_QUIET_SUBTESTS = """\
--- FAIL: TestAdd (0.00s)
    --- FAIL: TestAdd/neg (0.00s)
        calc_test.go:9: got 3
--- FAIL: TestSub (0.00s)
    calc_test.go:15: got 0
FAIL
FAIL\texample.com/demo\t0.002s
FAIL
"""
GO_QUIET_WITHOUT_LOG = """\
--- FAIL: TestAdd (0.00s)
--- FAIL: TestSub (0.00s)
    calc_test.go:15: got 0
FAIL
FAIL\texample.com/demo\t0.002s
FAIL
"""
GO_OLD_VERBOSE = """\
=== RUN   TestAdd
--- FAIL: TestAdd (0.00s)
    calc_test.go:8: got 3, want 4
=== RUN   TestLog
--- PASS: TestLog (0.00s)
    calc_test.go:22: just a log
FAIL
FAIL\texample.com/demo\t0.002s
"""
CARGO_ERR_FIRST = """\

running 2 tests
test tests::a ... FAILED
test tests::b ... FAILED

failures:

---- tests::a stdout ----
Error: ParseIntError { kind: InvalidDigit }

---- tests::b stdout ----

thread 'tests::b' (9862) panicked at t.rs:7:9:
assertion failed: false
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace


failures:
    tests::a
    tests::b

test result: FAILED. 0 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.14s
"""
CARGO_OTHER_ORDER = """\
test tests::b ... FAILED
test tests::a ... FAILED

failures:

---- tests::a stdout ----
thread 'tests::a' panicked at src/lib.rs:30:9:
assertion failed: false

---- tests::b stdout ----
thread '<unnamed>' panicked at src/lib.rs:41:13:
in a thread of b

failures:
    tests::a
    tests::b

test result: FAILED. 0 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
CARGO_DOCTEST = """\
test src/lib.rs - add (line 3) ... FAILED
test src/lib.rs - sub (line 12) ... FAILED

failures:

---- src/lib.rs - add (line 3) stdout ----
Test executable failed (exit status: 101).

stderr:
thread 'main' panicked at src/lib.rs:5:1:
assertion failed

test result: FAILED. 0 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
CARGO_NO_CAPTURE = """\
thread 'tests::b' panicked at src/lib.rs:30:9:
b
thread 'tests::a' panicked at src/lib.rs:20:9:
a
test tests::a ... FAILED
test tests::b ... FAILED
test result: FAILED. 0 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
MINITEST = """\
Run options: -v --seed 100

TestFoo#test_ok = 0.00 s = .
TestFoo#test_later = 0.00 s = S
TestFoo#test_bar = 0.00 s = F
TestFoo#test_baz = 0.00 s = F

  1) Skipped:
TestFoo#test_later [test/foo_test.rb:3]:
Skipped, no message given

  2) Failure:
TestFoo#test_bar [test/foo_test.rb:5]:
Expected: 1
  Actual: 2

  3) Failure:
TestFoo#test_baz [test/foo_test.rb:15]:
Expected: 3
  Actual: 4

4 runs, 2 assertions, 2 failures, 0 errors, 1 skips
"""
MINITEST_ERROR = """\
  1) Error:
Shop::CartTest#test_0001_adds an item:
NameError: undefined local variable or method 'x' for an instance of Shop::CartTest
    /usr/lib/ruby/gems/3.2.0/gems/rack-3.0/lib/rack.rb:9:in 'call'
    lib/cart.rb:6:in 'add'
    test/cart_test.rb:8:in 'block in <class:CartTest>'

  2) Failure:
Shop::CartTest#test_b [test/cart_test.rb:20]:
Expected: 3

2 runs, 1 assertions, 1 failures, 1 errors, 0 skips
"""
TEST_UNIT = """\
F
===============================================================================
Failure: test_bar(FooTest)
test/foo_test.rb:7:in 'test_bar'
     4:   def test_bar
  => 7:     assert_equal(1, 2)
<1> expected but was
<2>
===============================================================================
F
===============================================================================
Failure: test_baz(FooTest)
test/foo_test.rb:12:in 'test_baz'
===============================================================================
Finished in 0.006 seconds.
-------------------------------------------------------------------------------
2 tests, 2 assertions, 2 failures, 0 errors, 0 pendings, 0 omissions, 0 notifications
0% passed
"""
PROVE = """\
t/00-ok.t ... ok
t/10-bad.t ..
Dubious, test returned 1 (wstat 256, 0x100)
Failed 1/2 subtests

Test Summary Report
-------------------
t/10-bad.t (Wstat: 256 (exited 1) Tests: 2 Failed: 1)
  Failed test:  2
  Non-zero exit status: 1
Files=2, Tests=3,  0 wallclock secs ( 0.01 usr  0.00 sys +  0.05 cusr  0.01 csys =  0.07 CPU)
Result: FAIL
"""
PROVE_DIAGNOSTICS = """\

#   Failed test 'x'
#   at t/10-bad.t line 3.
#          got: '1'
#     expected: '2'
# Looks like you failed 1 test of 2.
"""
RSPEC = """\
*F.F

Pending: (Failures listed here are expected and do not affect your suite's status)

  1) Foo is pending
     # Not yet implemented
     # ./spec/foo_spec.rb:3

Failures:

  1) Foo bar returns 1
     Failure/Error: expect(Foo.new.bar).to eq(1)

       expected: 1
            got: 2

       (compared using ==)
     # ./spec/foo_spec.rb:7:in `block (3 levels) in <top (required)>'

  2) Foo baz works
     Failure/Error: raise "x"
     # ./lib/foo.rb:2:in `baz'
     # ./spec/foo_spec.rb:12:in `block (3 levels) in <top (required)>'

Finished in 0.01 seconds (files took 0.05 seconds to load)
4 examples, 2 failures, 1 pending

Failed examples:

rspec ./spec/foo_spec.rb:6 # Foo bar returns 1
rspec ./spec/foo_spec.rb:11 # Foo baz works

"""
RSPEC_SHARED = RSPEC.replace("./spec/foo_spec.rb:6 #", "'./spec/foo_spec.rb[1:2:1]' #")
TAP_TODO = """\
1..3
not ok 1 - later # TODO not written
#   Failed (TODO) test 'later'
#   at t/a.t line 4.
not ok 2 - adds
#   Failed test 'adds'
#   at t/a.t line 6.
not ok 3 - subs
#   Failed test 'subs'
#   at t/a.t line 9.
# Looks like you failed 2 tests of 3.
"""
NODE_SPEC = """\
▶ math
  ✔ subtracts (0.1ms)
  ✖ adds (0.5ms)
▶ math (2ms)
✖ other (0.2ms)
ℹ tests 3
ℹ pass 1
ℹ fail 2

✖ failing tests:

test at test/a.test.js:9:3
✖ adds (0.5ms)
  AssertionError [ERR_ASSERTION]: 3 == 4
      at TestContext.<anonymous> (file:///workspace/test/a.test.js:10:12)
      at Test.runInAsyncScope (node:async_hooks:206:9)

test at test/a.test.js:14:1
✖ other (0.2ms)
  AssertionError [ERR_ASSERTION]: 1 == 2
      at TestContext.<anonymous> (file:///workspace/test/a.test.js:15:12)
"""
NODE_SPEC_WITHOUT_FRAME = NODE_SPEC.replace(
    "      at TestContext.<anonymous> (file:///workspace/test/a.test.js:10:12)\n", ""
)
PHPUNIT = """\
There were 2 failures:

1) FooTest::testA
Failed asserting that false is true.

2) FooTest::testB
Failed asserting that 1 matches expected 2.

/workspace/tests/FooTest.php:19

FAILURES!
Tests: 2, Assertions: 2, Failures: 2.
"""
CTEST = """\
50% tests passed, 1 tests failed out of 2

Total Test time (real) =   0.01 sec

The following tests did not run:
\t  1 - slow (Disabled)

The following tests FAILED:
\t  2 - unit (Failed)
Errors while running CTest
"""
JEST = """\
FAIL src/a.test.js
  ● Console

    console.log
      hello

      at log (src/other.js:2:11)

  math
    ✓ subtracts (1 ms)
    ✕ adds (3 ms)
    ✕ divides (1 ms)

  ● math › adds

    expect(received).toBe(expected) // Object.is equality

    Expected: 4
    Received: 3

      at Object.toBe (src/a.test.js:9:21)
      at new Promise (<anonymous>)

  ● math › divides

    expect(received).toBe(expected) // Object.is equality

      at Object.toBe (src/a.test.js:14:21)

Test Suites: 1 failed, 1 total
Tests:       2 failed, 1 passed, 3 total
Snapshots:   0 total
"""
JEST_WITHOUT_FRAME = JEST.replace("      at Object.toBe (src/a.test.js:9:21)\n", "")
JEST_SUITE = """\
PASS src/ok.test.js
FAIL src/a.test.js
  ● Test suite failed to run

    TypeError: Cannot read properties of undefined (reading 'b')

      1 | const a = require('./a');
    > 2 | a.x.b();

      at Object.b (src/a.test.js:2:5)

Test Suites: 1 failed, 1 passed, 2 total
Tests:       1 passed, 1 total
"""
VITEST_LIST = """\

 RUN  v1.6.0 /workspace

 ❯ src/sum.test.ts  (3 tests | 2 failed) 5ms
   ❯ src/sum.test.ts > adds
     → expected 3 to be 4 // Object.is equality

 Test Files  1 failed (1)
      Tests  2 failed | 1 passed (3)
   Start at  10:00:00
   Duration  300ms
"""
VITEST_ERRORS = """\

⎯⎯⎯⎯⎯⎯⎯ Failed Tests 2 ⎯⎯⎯⎯⎯⎯⎯

 FAIL  src/sum.test.ts > math > adds
AssertionError: expected 3 to be 4 // Object.is equality

- Expected
+ Received

- 4
+ 3

 ❯ src/sum.test.ts:5:21
      3|
      4| test('adds', () => {
      5|   expect(sum(1, 2)).toBe(4)
       |                     ^

⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯[1/2]⎯

 FAIL  src/sum.test.ts > math > divides
Error: zero
 ❯ divide src/sum.ts:7:9
 ❯ src/sum.test.ts:9:3

⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯⎯[2/2]⎯

"""
VITEST_SAME_ERROR = VITEST_ERRORS.replace(
    "math > adds\n", "math > adds\n FAIL  src/sum.test.ts > math > adds again\n"
).replace("[1/2]", "[1/3]")
VITEST_3_LIST = """\
 ❯ src/sum.test.ts (1 test | 1 failed) 5ms
   × adds 3ms
     → expected 3 to be 4 // Object.is equality

 Test Files  1 failed (1)
      Tests  1 failed (1)
"""
MOCHA = """\


  Array
    ✔ ok
    1) should fail
    2) should work


  1 passing (5ms)
  2 failing

  1) Array
       should fail:

      AssertionError [ERR_ASSERTION]: 1 == 2
      + expected - actual

      -1
      +2

      at Context.<anonymous> (test/test.js:5:14)
      at process.processImmediate (node:internal/timers:476:21)

  2) Array
       should work:
     Error: x
      at Context.<anonymous> (test/test.js:9:11)
      at process.processImmediate (node:internal/timers:476:21)

"""
MOCHA_DOTS = "\n\n  .!!\n" + MOCHA[MOCHA.index("\n\n  1 passing") :]
MOCHA_TAP = """\
1..2
ok 1 Array ok
not ok 2 Array should fail
  Expected values to be loosely equal:

  1 == 2

  AssertionError [ERR_ASSERTION]: 1 == 2
      at Context.<anonymous> (test/test.js:5:14)
# tests 2
# pass 1
# fail 1
1..2
"""
MOCHA_WITHOUT_FRAME = MOCHA.replace("      at Context.<anonymous> (test/test.js:5:14)\n", "")

GO_TESTIFY = """\
--- FAIL: TestAdd (0.00s)
    calc_test.go:11:\u0020
        \tError Trace:\t/workspace/calc_test.go:11
        \tError:      \tNot equal:\u0020
        \t            \texpected: 4
        \t            \tactual  : 3
        \tTest:       \tTestAdd
FAIL
FAIL\texample.com/demo\t0.003s
FAIL
"""
GO_PANIC = """\
--- FAIL: TestDiv (0.00s)
    calc_test.go:14: about to divide
panic: runtime error: integer divide by zero [recovered]
\tpanic: runtime error: integer divide by zero

goroutine 7 [running]:
testing.tRunner.func1.2({0x51d2a0, 0x62b0f0})
\t/root/sdk/go1.22/src/testing/testing.go:1631 +0x24a
testing.tRunner.func1()
\t/root/sdk/go1.22/src/testing/testing.go:1634 +0x377
panic({0x51d2a0?, 0x62b0f0?})
\t/root/sdk/go1.22/src/runtime/panic.go:770 +0x132
example.com/each.Do(...)
\t/root/go/pkg/mod/example.com/each@v1.0.0/each.go:3 +0x10
example.com/demo.Div(...)
\t/workspace/calc.go:8
example.com/demo.TestDiv(0xc0000f2680?)
\t/workspace/calc_test.go:15 +0x5
testing.tRunner(0xc0000f2680, 0x549f18)
\t/root/sdk/go1.22/src/testing/testing.go:1689 +0xfb
created by testing.(*T).Run in goroutine 1
\t/root/sdk/go1.22/src/testing/testing.go:1742 +0x390
FAIL\texample.com/demo\t0.004s
FAIL
"""
GO_PANIC_SUBTEST = GO_PANIC.replace(
    "    calc_test.go:14", "    --- FAIL: TestDiv/zero (0.00s)\n        calc_test.go:14"
)
GO_PANIC_OTHER_TEST = "=== RUN   TestAdd\n--- FAIL: TestAdd (0.00s)\n=== RUN   TestDiv\n" + GO_PANIC
GO_PANIC_ELSEWHERE = """\
--- FAIL: TestAdd (0.00s)
panic: boom

goroutine 21 [running]:
example.com/demo.TestOther.func1()
\t/workspace/other_test.go:9 +0x27
created by example.com/demo.TestOther in goroutine 20
\t/workspace/other_test.go:8 +0x1d
FAIL\texample.com/demo\t0.004s
FAIL
"""
GO_BUILD_FAILED = """\
# example.com/demo [example.com/demo.test]
./calc_test.go:9:5: undefined: Mul
FAIL\texample.com/demo [build failed]
FAIL
"""
PHPUNIT_ERRORS = """\
There was 1 error:

1) FooTest::testA
Error: Call to undefined function add()

/workspace/src/Foo.php:7
/workspace/tests/FooTest.php:9

ERRORS!
Tests: 1, Assertions: 0, Errors: 1.
"""
CTEST_SPACES = """\
33% tests passed, 2 tests failed out of 3

The following tests FAILED:
\t  1 - slow (all files) (Disabled)
\t  2 - parses (all files) (SEGFAULT)
\t  3 - unit (Failed)
Errors while running CTest
"""
MOCHA_TIMEOUT = """\
  slow
    1) times out


  0 passing (2s)
  1 failing

  1) slow
       times out:
     Error: Timeout of 2000ms exceeded. For async tests, ensure "done()" is called. (/workspace/test/a.js)
      at listOnTimeout (node:internal/timers:581:17)
      at process.processTimers (node:internal/timers:519:7)

"""
DOTNET = """\
  Demo -> /workspace/bin/Debug/net8.0/Demo.dll
Test run for /workspace/bin/Debug/net8.0/Demo.dll (.NETCoreApp,Version=v8.0)
Starting test execution, please wait...
A total of 1 test files matched the specified pattern.
[xUnit.net 00:00:00.50]     Demo.Tests.Calc.Adds(a: 1, b: 2) [FAIL]
  Failed Demo.Tests.Calc.Adds(a: 1, b: 2) [12 ms]
  Error Message:
   Assert.Equal() Failure: Values differ
Expected: 4
Actual:   3
  Stack Trace:
     at Xunit.Assert.Equal[T](T expected, T actual) in /_/src/xunit.assert/Asserts/EqualityAsserts.cs:line 96
   at Demo.Tests.Calc.Adds(Int32 a, Int32 b) in /workspace/T.cs:line 12
   at System.RuntimeMethodHandle.InvokeMethod(Object target, Void** arguments)
  Failed Demo.Tests.Calc.Divides [< 1 ms]
  Stack Trace:
     at Demo.Tests.Calc.Divides() in /workspace/T.cs:line 20

Failed!  - Failed:     2, Passed:     2, Skipped:     0, Total:     4, Duration: 15 ms - Demo.dll (net8.0)
"""
DOTNET_WITHOUT_FRAME = DOTNET.replace("   at Demo.Tests.Calc.Adds(Int32 a, Int32 b) in /workspace/T.cs:line 12\n", "")

EXUNIT = """\
Compiling 3 files (.ex)
..

  1) test keeps the order (Shop.CartTest)
     test/shop/cart_test.exs:40
     ** (File.Error) could not write to file "/workspace/tmp/a.csv": no such file or directory
     code: File.write!(file, "x")
     stacktrace:
       (elixir 1.16.0) lib/file.ex:1021: File.write!/3
       test/shop/cart_test.exs:43: (test)

  2) test adds (Shop.CartTest)
     test/shop/cart_test.exs:50
     Assertion with == failed

Finished in 0.05 seconds (0.00s async, 0.05s sync)
2 doctests, 4 tests, 2 failures, 1 excluded
"""
HSPEC = """\
Failures:

  test/Spec.hs:10:9:
  1) Cart adds
       expected: 3
        but got: 2

  test/Spec.hs:14:9:
  2) Cart subtracts

2 examples, 2 failures
"""
BATS = """\
 ✓ subtracts
 ✗ adds
   (in test file test/a.bats, line 4)
     `[ "$result" -eq 3 ]' failed

2 tests, 1 failure
"""
CLOJURE = """\
FAIL in (adds) (core_test.clj:7)
expected: x
  actual: java.io.FileNotFoundException: x (No such file or directory)
Ran 2 tests containing 3 assertions.
1 failures, 0 errors.
"""
JULIA = """\
adds: Test Failed at /workspace/test/runtests.jl:5
  Expression: f(1) == 2
ERROR: LoadError: Some tests did not pass: 1 passed, 1 failed, 0 errored, 0 broken.
"""
BUSTED = """\
1 success / 1 failure / 0 errors / 0 pending : 0.01 seconds

Failure → spec/cart_spec.lua @ 3
cart adds
spec/cart_spec.lua:4: Expected objects to be the same.
"""
EXUNIT_SETUP = """\

  1) Shop.CartTest: failure on setup_all callback, all tests have been invalidated
     ** (RuntimeError) boom
     stacktrace:
       test/shop/cart_test.exs:5: Shop.CartTest.__ex_unit_setup_all_0/1

Finished in 0.02 seconds (0.00s async, 0.02s sync)
3 tests, 0 failures, 3 invalid
"""
EXUNIT_OLD = """\
  1) test removes (Shop.CartTest)
     test/shop/cart_test.exs:19
     ** (exit) exited in: GenServer.call(#PID<0.115.0>, :stop, 5000)
     stacktrace:
       (elixir) lib/gen_server.ex:357: GenServer.call/3
       test/shop/cart_test.exs:23

1 tests, 1 failures
"""
EUNIT = """\
Failures:

  1) cart_tests:add_test/0: module 'cart_tests'
     Failure/Error: ?assertEqual(3, cart : add ( 1 , 1 ))
     %% /workspace/test/cart_tests.erl:8:in `cart_tests:add_test/0`
     Output: no such file or directory

Finished in 0.1 seconds
2 tests, 1 failures
"""
SBT = """\
[info] CartSpec:
[info] - adds
[info] - rounds half up *** FAILED ***
[info]   10.2 was not equal to 10.25 (CartSpec.scala:17)
[info] - throws *** FAILED ***
[info]   at com.shop.Cart.total(Cart.scala:3)
[info] *** 2 TESTS FAILED ***
[error] Failed tests:
[error] \tcom.shop.CartSpec
"""
SBT_THROWN = SBT.replace(
    "[info] - rounds half up *** FAILED ***\n[info]   10.2 was not equal to 10.25 (CartSpec.scala:17)\n", ""
).replace("[info]   at com", "[info]   at scala.collection.immutable.List.head(List.scala:12)\n[info]   at com")
MUNIT = """\
com.shop.CartSuite:
==> X com.shop.CartSuite.rounds half up  0.05s munit.FailException: /workspace/src/test/scala/CartSuite.scala:12
[error] Failed: Total 1, Failed 1, Errors 0, Passed 0
"""
SUREFIRE = """\
[ERROR] Tests run: 3, Failures: 2, Errors: 0, Skipped: 0, Time elapsed: 0.045 s <<< FAILURE! -- in com.shop.tax.CartTest
[ERROR] com.shop.tax.CartTest.totalIsRounded -- Time elapsed: 0.004 s <<< FAILURE!
org.opentest4j.AssertionFailedError: expected: <10.25> but was: <10.2>
\tat org.junit.jupiter.api.AssertionFailureBuilder.build(AssertionFailureBuilder.java:151)
\tat com.shop.tax.CartTest.totalIsRounded(CartTest.java:31)
\tat java.base/java.lang.reflect.Method.invoke(Method.java:580)

[ERROR] com.shop.tax.CartTest.other -- Time elapsed: 0.001 s <<< FAILURE!
\tat com.shop.tax.CartTest.other(CartTest.java:40)

[ERROR] Tests run: 3, Failures: 2, Errors: 0, Skipped: 0
"""
SUREFIRE_OTHERS_ONLY = SUREFIRE.replace("\tat com.shop.tax.CartTest.totalIsRounded(CartTest.java:31)\n", "")
SUREFIRE_OLD = """\
totalIsRounded(com.shop.tax.CartTest)  Time elapsed: 0.004 sec  <<< ERROR!
java.lang.NullPointerException: null
\tat com.google.common.base.Preconditions.checkNotNull(Preconditions.java:787)
\tat com.shop.money.Money.of(Money.java:9)
\tat com.shop.tax.CartTest.totalIsRounded(CartTest.java:31)

Tests run: 3, Failures: 0, Errors: 1, Skipped: 0
"""
GRADLE = """\
> Task :test FAILED

CartTest > totalIsRounded() FAILED
    org.opentest4j.AssertionFailedError at CartTest.java:31
        Caused by: java.io.IOException: no such file or directory

CartTest > other() FAILED
    java.lang.NullPointerException at CartTest.java:40

3 tests completed, 2 failed
"""
GRADLE_FULL = """\
com.shop.CartTest > totalIsRounded() FAILED
    org.opentest4j.AssertionFailedError: expected: <1> but was: <2>
        at app//org.junit.jupiter.api.AssertionFailureBuilder.build(AssertionFailureBuilder.java:151)
        at app//com.shop.CartTest.totalIsRounded(CartTest.java:31)

3 tests completed, 1 failed
"""
CARGO_QUIET = """\

running 2 tests
.F
failures:

---- tests::a stdout ----

thread 'tests::a' (123) panicked at src/lib.rs:7:9:
assertion failed: false


failures:
    tests::a

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
CARGO_QUIET_NAMED = CARGO_QUIET.replace(".F\n", ".\ntests::a --- FAILED\n")
NEXTEST = """\
        PASS [   0.004s] demo tests::b
        FAIL [   0.005s] demo tests::a

--- STDERR:              demo tests::a ---
thread 'tests::a' panicked at src/lib.rs:7:9:
assertion failed

     Summary [   0.006s] 2 tests run: 1 passed, 1 failed, 0 skipped
"""
GO_PANIC_UNNAMED = """\
panic: runtime error: invalid memory address or nil pointer dereference
[signal SIGSEGV: segmentation violation code=0x1 addr=0x0 pc=0x51e699]

goroutine 7 [running]:
example.org/shop/cart.NextBytes()
\t/workspace/cart/out.go:27 +0x19
example.org/shop/cart/null.Configure.func1()
\t/workspace/cart/null/out.go:12 +0xf
created by example.org/shop/cart/null.Configure in goroutine 6
\t/workspace/cart/null/out.go:10 +0x34
FAIL\texample.org/shop\t0.007s
FAIL
"""
DENO = """\
running 2 tests from ./main_test.ts
adds ... FAILED (5ms)

 ERRORS

adds => ./main_test.ts:5:6
error: AssertionError: Values are not equal.
    at assertEquals (https://jsr.io/@std/assert/1.0.0/equals.ts:5:9)
    at file:///workspace/main_test.ts:6:3

 FAILURES

adds => ./main_test.ts:5:6

FAILED | 1 passed | 1 failed (10ms)
"""
BUN = """\
bun test v1.1.0

src/a.test.ts:
(pass) math > subtracts [0.03ms]
error: expect(received).toBe(expected)

      at <anonymous> (/workspace/src/a.test.ts:5:21)
(fail) math > adds [0.50ms]

 1 pass
 1 fail
Ran 2 tests across 1 files. [8.00ms]
"""
JASMINE = """\
Failures:
1) Calc adds
  Message:
    Expected 1 to be 2.
  Stack:
        at <Jasmine>
        at UserContext.<anonymous> (/workspace/spec/calc.spec.js:5:21)

3 specs, 1 failure
"""
PLAYWRIGHT = """\
  1) [chromium] › tests/a.spec.ts:5:1 › has title ─────────────────

    Error: expect(page).toHaveTitle(expected) failed

        at /workspace/tests/a.spec.ts:7:24

  1 failed
"""
PEST = """\
   FAIL  Tests\\Unit\\CartTest
  ────────────────────────────
   FAILED  Tests\\Unit\\CartTest > it adds
  Failed asserting that 3 is identical to 2.

  at tests/Unit/CartTest.php:4

  Tests:    1 failed, 1 passed (2 assertions)
"""
GTEST = """\
[ RUN      ] CalcTest.Subtracts
/workspace/test/calc_test.cc:5: Skipped
[  SKIPPED ] CalcTest.Subtracts (0 ms)
[ RUN      ] CalcTest.Adds
/workspace/test/calc_test.cc:12: Failure
Expected equality of these values:
[  FAILED  ] CalcTest.Adds (0 ms)
[  FAILED  ] 1 test, listed below:
[  FAILED  ] CalcTest.Adds
"""
CATCH = """\
test.cpp:7: FAILED:
  REQUIRE( add(1, 1) == 3 )

test cases: 1 | 1 failed
assertions: 1 | 1 failed
"""
BOOST = """\
test.cpp(7): error: in "adds": check add(1, 1) == 3 has failed

*** 1 failure is detected in the test module "calc"
"""
XCTEST = """\
/workspace/Tests/DemoTests/DemoTests.swift:8: error: DemoTests.testAdd : XCTAssertEqual failed: ("3") is not ("4") -
Test Case 'DemoTests.testAdd' failed (0.001 seconds)
Executed 2 tests, with 1 failure (0 unexpected) in 0.0 (0.0) seconds
"""
SWIFT = """\
✘ Test adds() recorded an issue at DemoTests.swift:8:5: Expectation failed: add(1, 1) == 3
✘ Test run with 2 tests failed after 0.001 seconds with 1 issue.
"""
DART = """\
00:00 +0 -1: adds [E]
  Expected: <4>
  package:matcher           expect
  test/calc_test.dart 6:5   main.<fn>

00:00 +1 -1: Some tests failed.
"""

# command, exit code, standard output, standard error, test id, file, line
REPORTS = [
    ("go test -v ./...", 1, GO_VERBOSE, "", "TestAdd", "calc_test.go", 8),
    ("go test -v ./...", 1, GO_VERBOSE_OTHER_LOGS, "", "TestAdd", None, None),
    ("go test -v ./...", 1, GO_VERBOSE_SUBTESTS, "", "TestAdd", "calc_test.go", 11),
    ("go test -v ./...", 1, GO_VERBOSE_PARALLEL, "", "TestA", "a_test.go", 7),
    ("go test -v ./...", 1, GO_TWO_PACKAGES, "", "TestSame", "two_test.go", 9),
    ("go test ./...", 1, GO_QUIET_SUBTESTS, "", "TestAdd", "calc_test.go", 9),
    ("go test ./...", 1, GO_QUIET_WITHOUT_LOG, "", "TestAdd", None, None),
    ("go test -v ./...", 1, GO_OLD_VERBOSE, "", "TestAdd", "calc_test.go", 8),
    ("cargo test", 101, CARGO_ERR_FIRST, "error: test failed, to rerun pass `--lib`\n", "tests::a", None, None),
    ("cargo test", 101, CARGO_OTHER_ORDER, "", "tests::b", "src/lib.rs", 41),
    ("cargo test", 101, CARGO_DOCTEST, "", "src/lib.rs", "src/lib.rs", 5),
    ("cargo test -- --nocapture", 101, CARGO_NO_CAPTURE, "", "tests::a", "src/lib.rs", 20),
    ("ruby test/foo_test.rb -v", 1, MINITEST, "", "TestFoo#test_bar", "test/foo_test.rb", 5),
    ("ruby test/cart_test.rb", 1, MINITEST_ERROR, "", "Shop::CartTest#test_0001_adds an item", "lib/cart.rb", 6),
    ("ruby test/foo_test.rb", 1, TEST_UNIT, "", "test_bar(FooTest)", "test/foo_test.rb", 7),
    ("prove t", 1, PROVE, PROVE_DIAGNOSTICS, "t/10-bad.t", "t/10-bad.t", 3),
    ("prove t", 1, PROVE, "", "t/10-bad.t", None, None),
    ("bundle exec rspec", 1, RSPEC, "", "./spec/foo_spec.rb:6", "spec/foo_spec.rb", 7),
    ("bundle exec rspec", 1, RSPEC_SHARED, "", "./spec/foo_spec.rb[1:2:1]", "spec/foo_spec.rb", 7),
    ("bundle exec rspec | tail -5", 1, RSPEC[-190:], "", "./spec/foo_spec.rb:6", None, None),
    ("perl t/a.t 2>&1", 2, TAP_TODO, "", "adds", "t/a.t", 6),
    ("node --test", 1, NODE_SPEC, "", "adds", "test/a.test.js", 10),
    ("node --test", 1, NODE_SPEC_WITHOUT_FRAME, "", "adds", None, None),
    ("vendor/bin/phpunit", 1, PHPUNIT, "", "FooTest::testA", None, None),
    ("ctest", 8, CTEST, "", "unit", None, None),
    ("npx jest", 1, "", JEST, "math › adds", "src/a.test.js", 9),
    ("npx jest", 1, "", JEST_WITHOUT_FRAME, "math › adds", None, None),
    ("npx jest", 1, "", JEST_SUITE, None, "src/a.test.js", 2),
    ("npx vitest run", 1, VITEST_LIST, VITEST_ERRORS, "src/sum.test.ts > math > adds", "src/sum.test.ts", 5),
    ("npx vitest run", 1, VITEST_LIST, VITEST_SAME_ERROR, "src/sum.test.ts > math > adds", "src/sum.test.ts", 5),
    ("npx vitest run 2>/dev/null", 1, VITEST_LIST, "", "src/sum.test.ts > adds", None, None),
    ("npx vitest run 2>/dev/null", 1, VITEST_3_LIST, "", "adds", None, None),
    ("npx mocha", 2, MOCHA, "", "should fail", "test/test.js", 5),
    ("npx mocha -R dot", 2, MOCHA_DOTS, "", None, "test/test.js", 5),
    ("npx mocha -R tap", 1, MOCHA_TAP, "", "Array should fail", None, None),
    ("npx mocha", 2, MOCHA_WITHOUT_FRAME, "", "should fail", None, None),
    ("npx mocha", 1, MOCHA_TIMEOUT, "", "times out", "test/a.js", None),
    ("go test ./...", 1, GO_TESTIFY, "", "TestAdd", "calc_test.go", 11),
    ("go test ./...", 1, GO_PANIC, "", "TestDiv", "calc.go", 8),
    ("go test ./...", 1, GO_PANIC_SUBTEST, "", "TestDiv", "calc.go", 8),
    ("go test -v ./...", 1, GO_PANIC_OTHER_TEST, "", "TestAdd", None, None),
    ("go test ./...", 1, GO_PANIC_ELSEWHERE, "", "TestAdd", None, None),
    ("go test ./...", 1, GO_BUILD_FAILED + GO_TESTIFY, "", "TestAdd", "calc_test.go", 11),
    ("vendor/bin/phpunit", 2, PHPUNIT_ERRORS, "", "FooTest::testA", "src/Foo.php", 7),
    ("ctest", 8, CTEST_SPACES, "", "parses (all files)", None, None),
    ("dotnet test", 1, DOTNET, "", "Demo.Tests.Calc.Adds(a: 1, b: 2)", "T.cs", 12),
    ("dotnet test", 1, DOTNET_WITHOUT_FRAME, "", "Demo.Tests.Calc.Adds(a: 1, b: 2)", None, None),
    ("mix test", 2, EXUNIT, "", "test keeps the order (Shop.CartTest)", "test/shop/cart_test.exs", 43),
    ("mix test 2>&1", 2, EXUNIT, "", "test keeps the order (Shop.CartTest)", "test/shop/cart_test.exs", 43),
    ("mix test", 2, EXUNIT_SETUP, "", "Shop.CartTest", "test/shop/cart_test.exs", 5),
    ("mix test", 2, EXUNIT_OLD, "", "test removes (Shop.CartTest)", "test/shop/cart_test.exs", 23),
    ("cabal test", 1, HSPEC, "", "Cart adds", "test/Spec.hs", 10),
    ("bats --pretty test", 1, BATS, "", "adds", "test/a.bats", 4),
    ("lein test", 1, CLOJURE, "Tests failed.\n", "adds", "core_test.clj", 7),
    ("julia test/runtests.jl", 1, JULIA, "", None, "test/runtests.jl", 5),
    ("busted", 1, BUSTED, "", None, "spec/cart_spec.lua", 4),
    ("rebar3 eunit", 1, EUNIT, "", "cart_tests:add_test/0", "test/cart_tests.erl", 8),
    ("sbt test", 1, SBT, "", "rounds half up", "CartSpec.scala", 17),
    ("sbt test", 1, SBT_THROWN, "", "throws", "Cart.scala", 3),
    ("sbt test", 1, MUNIT, "", "com.shop.CartSuite.rounds half up", "src/test/scala/CartSuite.scala", 12),
    ("mvn -q test", 1, SUREFIRE, "", "com.shop.tax.CartTest.totalIsRounded", "CartTest.java", 31),
    ("mvn -q test", 1, SUREFIRE_OTHERS_ONLY, "", "com.shop.tax.CartTest.totalIsRounded", None, None),
    ("mvn test", 1, SUREFIRE_OLD, "", "totalIsRounded(com.shop.tax.CartTest)", "Money.java", 9),
    (
        "./gradlew test",
        1,
        GRADLE,
        "FAILURE: Build failed with an exception.\n",
        "CartTest > totalIsRounded()",
        "CartTest.java",
        31,
    ),
    ("./gradlew test", 1, GRADLE_FULL, "", "com.shop.CartTest > totalIsRounded()", "CartTest.java", 31),
    ("cargo test -q", 101, CARGO_QUIET, "", "tests::a", "src/lib.rs", 7),
    ("cargo test -q", 101, CARGO_QUIET_NAMED, "", "tests::a", "src/lib.rs", 7),
    ("cargo nextest run", 100, "", NEXTEST, "demo tests::a", "src/lib.rs", 7),
    ("go test ./...", 1, GO_PANIC_UNNAMED, "", None, "cart/out.go", 27),
    ("deno test", 1, DENO, "error: Test failed\n", "adds", "main_test.ts", 6),
    ("bun test", 1, "", BUN, "math > adds", "src/a.test.ts", 5),
    ("npx jasmine", 3, JASMINE, "", "Calc adds", "spec/calc.spec.js", 5),
    ("npx playwright test", 1, PLAYWRIGHT, "", "[chromium] › tests/a.spec.ts:5:1 › has title", "tests/a.spec.ts", 7),
    ("vendor/bin/pest", 1, PEST, "", "Tests\\Unit\\CartTest > it adds", "tests/Unit/CartTest.php", 4),
    ("./build/tests", 1, GTEST, "", "CalcTest.Adds", "test/calc_test.cc", 12),
    ("./build/tests", 1, CATCH, "", None, "test.cpp", 7),
    ("./build/tests", 201, "", BOOST, "adds", "test.cpp", 7),
    ("swift test", 1, "", XCTEST, "DemoTests.testAdd", "Tests/DemoTests/DemoTests.swift", 8),
    ("swift test", 1, SWIFT, "", "adds()", "DemoTests.swift", 8),
    ("dart test", 1, DART, "", "adds", "test/calc_test.dart", 6),
]


@pytest.mark.parametrize(("command", "exit_code", "stdout", "stderr", "test_id", "file", "line"), REPORTS)
def test_the_site_is_in_the_part_of_the_first_failing_test(
    command: str,
    exit_code: int,
    stdout: str,
    stderr: str,
    test_id: str | None,
    file: str | None,
    line: int | None,
) -> None:
    found = find(command, exit_code, stdout, stderr)
    assert (found.error_kind, *place(found)) == ("test_failure", test_id, file, line)


def test_a_report_of_a_run_that_ended_well_is_no_error() -> None:
    for _, _, stdout, stderr, *_ in REPORTS:
        assert find("./check.sh", 0, stdout, stderr) == NOTHING_WRONG


@pytest.mark.parametrize("command", ["go test ./...", "make test", "./check.sh"])
def test_go_tests_that_could_not_be_built_are_a_build_error(command: str) -> None:
    errors, verdict = GO_BUILD_FAILED.split("FAIL", 1)
    for stdout, stderr in ((GO_BUILD_FAILED, ""), (f"FAIL{verdict}", errors)):
        found = find(command, 1, stdout, stderr)
        assert (found.error_kind, *place(found)) == ("build_error", None, "calc_test.go", 9)
    assert find(command, 1, f"FAIL{verdict}").error_kind == "test_failure"


UNKNOWN_REPORT = """\
not even close: the file /workspace/data/x does not exist
expected a value, got nothing
Could not open '/workspace/data/y': No such file or directory
"""
COUNTS = [
    "1 of 3 scenarios failed",
    "# FAIL:  1",
    "Tests Passed: 1, Failed: 1",
    "2 out of 5 tests failed",
]


@pytest.mark.parametrize(
    "command", ["lein test", "npm run test:unit 2>&1", "make check", "busted", "./gradlew testDebugUnitTest"]
)
def test_a_word_in_the_report_of_an_unknown_runner_is_no_error_of_the_action(command: str) -> None:
    for count in COUNTS:
        for found in (
            find(command, 1, f"{UNKNOWN_REPORT}{count}\n"),
            find(command, 1, "", f"{UNKNOWN_REPORT}{count}\n"),
        ):
            assert (found.error_kind, *place(found)) == ("test_failure", None, None, None)
        assert find(command, 0, f"{UNKNOWN_REPORT}{count}\n") == NOTHING_WRONG
    assert find(command, 1, UNKNOWN_REPORT).error_kind == "nonzero_exit"
    assert find(command, 1, "", UNKNOWN_REPORT).error_kind == "nonzero_exit"


NOT_TESTS = [
    ("npm test", 1, "cat: fixtures/x: No such file or directory\n", "path_not_found"),
    ("npm test", 127, "sh: 1: jest: not found\n\n1 failed\n", "command_not_found"),
    ("npm test", 2, "src/a.ts(3,5): error TS2322: Type 'x'\n1 failed\n", "build_error"),
    (
        "go test ./...",
        1,
        "failed to initialize build cache at /root/x: mkdir /root/x: permission denied\n",
        "permission_denied",
    ),
    ("npx vitest --nope", 1, "CACError: Unknown option `--nope`\n", "invalid_arguments"),
    ("npx ava --nope", 1, 'Unrecognized option "nope".\n', "invalid_arguments"),
    ("vendor/bin/phpunit nope", 1, 'Could not open input file "nope"\n', "path_not_found"),
    ("npx mocha test/nope.js", 1, "Could not find file test/nope.js\n", "path_not_found"),
    ("ruff check a.py", 1, "Could not read a.py: No such file or directory\n", "path_not_found"),
    ("go test --nope", 2, "flag provided but not defined: -nope\nusage: go test\n", "invalid_arguments"),
    ("pytest nope", 4, "ERROR: file or directory not found: nope\n", "path_not_found"),
    ("cat test/a", 1, "cat: test/a: No such file or directory\n", "path_not_found"),
    ("./deploy", 1, "1 failed: cannot stat '/etc/x.conf'\n", "path_not_found"),
]


@pytest.mark.parametrize(("command", "exit_code", "stderr", "kind"), NOT_TESTS)
def test_what_kept_tests_from_running_has_its_own_kind(command: str, exit_code: int, stderr: str, kind: str) -> None:
    assert find(command, exit_code, "", stderr).error_kind == kind
