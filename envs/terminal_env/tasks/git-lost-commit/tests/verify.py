from errata_verify import GitObjects, check, data, require

BALANCE = '"""Balances by account."""\n\nfrom parse import parse\n\n\ndef balances(lines):\n    """Return the sum of the amounts of each account, by name."""\n    total = {}\n    for line in lines:\n        name, amount = parse(line)\n        total[name] = total.get(name, 0) + amount\n    return dict(sorted(total.items()))\n'.encode()
README = b"# Ledger\n\nBalances from entries.\n\nRun it with Python 3.11.\n"
EXAMPLE = b"ana,5\nben,-3\nana,7\n"
PARSE = b'def parse(line):\n    name, _, amount = line.partition(",")\n    return name, int(amount)\n'
IGNORE = "24caca187d2335c6c3aba57bdc1d37ce14ba75ef"


def main():
    repository = GitObjects("ledger")
    return repository, repository.ref("refs/heads/main")


@require
def later_work_is_still_there():
    repository, head = main()
    assert IGNORE in repository.commits(head), "the commit 'Ignore bytecode' is not part of main"
    assert repository.file(head, "parse.py") == PARSE and repository.file(head, ".gitignore") == b"*.pyc\n"


@check()
def the_files_of_the_first_lost_commit():
    repository, head = main()
    assert repository.file(head, "balance.py") == BALANCE
    assert repository.file(head, "example.csv") == EXAMPLE


@check()
def the_change_of_the_second_lost_commit():
    repository, head = main()
    assert repository.file(head, "README.md") == README


def brings(repository, commit, name, content):
    """Say whether a commit has a file with that content, and none of its parents does."""

    def has(commit):
        return name in repository.names(commit) and repository.file(commit, name) == content

    return has(commit) and not any(has(parent) for parent in repository.parents(commit))


@check(needs=[the_files_of_the_first_lost_commit, the_change_of_the_second_lost_commit])
def the_history_tells_both():
    """Each message stands at the commit that brings its work: empty commits with the right messages tell nothing."""
    repository, head = main()
    commits = [(commit, repository.message(commit).strip()) for commit in repository.commits(head)]
    for message, work in (
        ("Add balances by account", {"balance.py": BALANCE, "example.csv": EXAMPLE}),
        ("Say which Python", {"README.md": README}),
    ):
        named = [commit for commit, said in commits if said == message]
        assert len(named) == 1, f"{message!r} is there {len(named)} times"
        for name, content in work.items():
            assert brings(repository, named[0], name, content), f"{message!r} does not bring {name}"


@check(weight=0.5, needs=[the_files_of_the_first_lost_commit])
def main_is_checked_out_and_clean():
    repository, head = main()
    assert repository.head_name() == "refs/heads/main"
    assert repository.is_staged(head), "something is left to commit"
    for name in repository.names(head):
        assert data("ledger/" + name) == repository.file(head, name), f"{name} differs from main"
