import pytest

from confkit import Config, ConfigError, MissingKey, WrongType


@pytest.fixture
def config():
    return Config(
        {"db": {"port": "5432", "host": "localhost"}, "debug": "no"},
        {"db": {"host": "db1"}, "servers": [{"name": "a"}, {"name": "b"}]},
    )


def test_later_layers_win(config):
    assert config.get("db.host") == "db1"
    assert config.get("db.port") == "5432"


def test_lists_have_indexes(config):
    assert config.get("servers.1.name") == "b"


def test_a_missing_key_is_an_error_with_the_whole_key(config):
    with pytest.raises(MissingKey, match="db.user") as caught:
        config.get("db.user")
    assert caught.value.key == "db.user"
    assert isinstance(caught.value, ConfigError)


def test_a_default_is_taken_for_a_missing_key(config):
    assert config.get("db.user", default="me") == "me"
    assert config.integer("db.timeout", default=3) == 3


def test_numbers_and_truth(config):
    assert config.integer("db.port") == 5432
    assert config.boolean("debug") is False


def test_truth_of_another_text_is_a_wrong_type(config):
    with pytest.raises(WrongType):
        config.boolean("db.host")


def test_a_key_that_is_there_is_in_it(config):
    assert "db.host" in config
