import hashlib

from errata_verify import GitObjects, NotSolved, check, mode, require, sha256, text

CULPRIT = "e8078a7b141ac5f08a8a8fa66e8fc0eba0136ae0"
MAIN = "f38264197edfc87ac46f2d5d6e4fe76c77ecde6d"
UNDONE = {
    "Makefile": "8e8985e9730a0e809f48fee9916f3650725c4841b6b3bf80fe199678eae82b2a",
    "README": "e4829cadeab2ec6d0ba795f949997fa315b4635adbfe05a0ea8d86919efe61db",
    "check.sh": "4cdab5827a30cb95aeb0fa7cd434b65205b26c434c36d7841cbff427a6dc2c45",
    "invoice.py": "24203c53880f5534f30ad1c493f449230ba357a5d7d0b003779aae6fc98ca3cc",
}
"""sha256 of every file of main without the changes of the culprit."""


def undone():
    """Return the repository and the one commit on top of main."""
    repository = GitObjects("invoice")
    head = repository.ref("refs/heads/main")
    if repository.parents(head) != [MAIN]:
        raise NotSolved("main is not its former tip and one commit")
    return repository, head


@require
def the_commits_that_are_there_stay():
    repository = GitObjects("invoice")
    assert MAIN in repository.commits(repository.ref("refs/heads/main")), "main lost its former tip"


@require
def the_check_is_as_it_was():
    assert sha256("invoice/check.sh") == UNDONE["check.sh"]


@check()
def the_culprit_is_found():
    assert text("culprit.txt").strip() == CULPRIT


@check()
def the_program_is_as_without_it():
    repository, head = undone()
    assert hashlib.sha256(repository.file(head, "invoice.py")).hexdigest() == UNDONE["invoice.py"]


@check()
def every_file_is_as_without_it():
    repository, head = undone()
    assert sorted(repository.names(head)) == sorted(UNDONE)
    for name, digest in UNDONE.items():
        assert hashlib.sha256(repository.file(head, name)).hexdigest() == digest, name


@check(weight=0.5)
def the_files_on_disk_are_those_of_main():
    repository, head = undone()
    assert repository.head_name() == "refs/heads/main" and repository.is_staged(head)
    for name, digest in UNDONE.items():
        assert sha256("invoice/" + name) == digest, name
    assert mode("invoice/check.sh") & 0o111, "check.sh cannot be run"
