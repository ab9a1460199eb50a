from errata_verify import check, json_file

ANSWER = {'attacker': '203.0.113.66', 'account': 'backup', 'first_login': '14:22:46', 'failed_attempts': 47, 'new_account': 'svc-sync', 'stolen_bytes': 8812345}


def answer(*keys):
    incident = json_file("incident.json")
    assert isinstance(incident, dict), "incident.json is no object"
    for key in keys:
        assert incident.get(key) == ANSWER[key], f"{key}: {incident.get(key)!r}"


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
