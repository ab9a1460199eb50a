import json

from errata_verify import GitObjects, NotSolved, check, json_file

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


@check()
def main_is_the_merge_of_both():
    repository, head = merged()
    assert {"NOTES", "queue_pick.py", "settings.json"} <= set(repository.names(head))
    assert repository.file(head, "NOTES") == b"relay forwards messages over TLS.\n"


@check(weight=2)
def the_settings_have_both_sides():
    repository, head = merged()
    try:
        settings = json.loads(repository.file(head, "settings.json"))
    except ValueError as error:
        raise NotSolved(f"settings.json: {error}") from error
    assert settings == SETTINGS


@check(weight=0.5)
def the_files_on_disk_are_those_of_the_merge():
    merged()
    assert json_file("relay/settings.json") == SETTINGS
