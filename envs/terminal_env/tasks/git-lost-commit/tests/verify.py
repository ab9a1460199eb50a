from errata_verify import GitObjects, NotSolved, check, data, require

BALANCE = '"""Balances by account."""\n\nfrom parse import parse\n\n\ndef balances(lines):\n    """Return the sum of the amounts of each account, by name."""\n    total = {}\n    for line in lines:\n        name, amount = parse(line)\n        total[name] = total.get(name, 0) + amount\n    return dict(sorted(total.items()))\n'.encode()
README = b"# Ledger\n\nBalances from entries.\n\nRun it with Python 3.11.\n"
EXAMPLE = b"ana,5\nben,-3\nana,7\n"
IGNORE = "24caca187d2335c6c3aba57bdc1d37ce14ba75ef"


def main():
    repository = GitObjects("ledger")
    return repository, repository.ref("refs/heads/main")


@require
def later_work_is_still_there():
    repository, head = main()
    assert IGNORE in repository.commits(head), "the commit 'Ignore bytecode' is not part of main"


@check()
def the_files_of_the_first_lost_commit():
    repository, head = main()
    assert repository.file(head, "balance.py") == BALANCE
    assert repository.file(head, "example.csv") == EXAMPLE


@check()
def the_change_of_the_second_lost_commit():
    repository, head = main()
    assert repository.file(head, "README.md") == README


@check()
def the_history_tells_both():
    repository, head = main()
    messages = [repository.message(commit).strip() for commit in repository.commits(head)]
    for message in ("Add balances by account", "Say which Python"):
        assert messages.count(message) == 1, f"{message!r} is there {messages.count(message)} times"


@check(weight=0.5)
def main_is_checked_out_and_clean():
    repository, head = main()
    assert repository.head_name() == "refs/heads/main"
    names = repository.names(head)
    if "balance.py" not in names:
        raise NotSolved("main has no balance.py")
    for name in names:
        assert data("ledger/" + name) == repository.file(head, name), f"{name} differs from main"
