from errata_verify import check, json_file, require, sha256

ANSWER = {'attacker': '203.0.113.66', 'account': 'backup', 'first_login': '14:22:46', 'failed_attempts': 47, 'new_account': 'svc-sync', 'stolen_bytes': 8812345}

LOGS = {
    "logs/auth.log": "2030471cd7cfb4525a658d502b54f4b9f549190b12ce4d97a3146e6dbbd80f74",
    "logs/auth.log.1": "ad460e1776ddde34f6c3e6df3416c0083c9042a78096032fbf3a41e785905ad2",
    "logs/web.log": "580f61de715ff2251bb1a13b0da61a8c2ad03cf4c6e2fa1400bda004b38026cb",
}


@require
def the_logs_are_as_they_were():
    for name, digest in LOGS.items():
        assert sha256(name) == digest, f"{name} changed"


def answer(*keys):
    """What is said of somebody else is worth nothing: the scanner is louder, and the largest answer stands out."""
    incident = json_file("incident.json")
    assert isinstance(incident, dict), "incident.json is no object"
    for key in ("attacker", *keys):
        assert type(incident.get(key)) is type(ANSWER[key]) and incident[key] == ANSWER[key], f"{key}: {incident.get(key)!r}"


@check()
def who_it_was():
    answer("attacker", "account")


@check()
def when_it_was():
    answer("first_login", "failed_attempts")


@check()
def what_was_left_behind():
    answer("new_account")


@check()
def what_was_taken():
    answer("stolen_bytes")


@check(weight=0.5)
def the_form_is_as_asked():
    answer(*ANSWER)
    assert set(json_file("incident.json")) == set(ANSWER)
