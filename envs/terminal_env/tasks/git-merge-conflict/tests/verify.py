import json

from errata_verify import GitObjects, NotSolved, check, json_file, require

SETTINGS = {
    "name": "relay",
    "port": 9090,
    "timeout_s": 60,
    "retries": 5,
    "log": "info",
    "tls": True,
    "queue": "fast",
}
MAIN = "227d5b0bf0ee77910a348293959ce3db4ca0085a"
QUEUE = "eabb51adc05c68f3f9aa048985cf18a5bc0ede25"


def merged():
    repository = GitObjects("relay")
    head = repository.ref("refs/heads/main")
    if repository.head_name() != "refs/heads/main" or set(repository.parents(head)) != {MAIN, QUEUE}:
        raise NotSolved("main is no merge of the two tips")
    return repository, head


def settings(repository, head):
    try:
        return json.loads(repository.file(head, "settings.json"))
    except (ValueError, RecursionError) as error:
        raise NotSolved(f"settings.json: {error}") from error


@require
def main_is_the_merge_of_both():
    repository, head = merged()
    assert {"NOTES", "queue_pick.py", "settings.json"} <= set(repository.names(head))
    assert repository.file(head, "NOTES") == b"relay forwards messages over TLS.\n"
    assert repository.file(head, "queue_pick.py") == b"def pick(queue):\n    return queue.pop(0)\n"


@require
def no_key_of_either_side_is_lost():
    """To take one side, or to commit the conflict, is not to merge."""
    found = settings(*merged())
    assert isinstance(found, dict) and set(found) == set(SETTINGS), "not the keys of both sides"


def same(*keys):
    found = settings(*merged())
    for key in keys:
        assert type(found[key]) is type(SETTINGS[key]) and found[key] == SETTINGS[key], f"{key}: {found[key]!r}"


@check()
def what_nobody_and_what_one_side_added():
    same("name", "log", "tls", "queue")


@check(needs=[what_nobody_and_what_one_side_added])
def what_one_side_changed():
    same("port", "retries")


@check(needs=[what_nobody_and_what_one_side_added])
def what_both_sides_changed():
    same("timeout_s")


@check(weight=0.5, needs=[what_one_side_changed, what_both_sides_changed])
def the_files_on_disk_are_those_of_the_merge():
    assert json_file("relay/settings.json") == SETTINGS
