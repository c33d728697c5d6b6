"""`[stores.NAME]`: the servers of stores of views."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstate.config import load
from everstate.errors import InvalidConfig, LocalStackError, UnknownSetting
from everstate.local import Stack
from everstate.local.redis import RedisServer

SECRET = "hunter2hunter2"


def written(folder: Path, text: str) -> Path:
    (folder / "everstate.toml").write_text(text)
    return folder


def test_a_store_has_a_section_of_its_name_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, '[stores.redis]\nurl = "redis://a"\n[stores.my_own]\nssl_cafile = "ca.pem"\n')
    monkeypatch.setenv("EVERSTATE_STORES_REDIS_URL", "rediss://b:1")
    # A password that looks like a number stays as it is written.
    monkeypatch.setenv("EVERSTATE_STORES_REDIS_PASSWORD", "1e5")
    monkeypatch.setenv("EVERSTATE_STORES_MY_OWN_USER", "me")
    config = load(tmp_path)
    redis, own = config.stores.server("redis"), config.stores.server("my_own")
    assert redis.url == "rediss://b:1"
    assert redis.password is not None
    assert redis.password.get_secret_value() == "1e5"
    assert (own.user, own.ssl_cafile) == ("me", tmp_path / "ca.pem")
    assert config.stores.server("none").url is None
    assert "rediss" not in repr(config)
    assert config.stores.with_url("redis", "redis://c").server("redis").url == "redis://c"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f'[stores.redis]\nurll = "{SECRET}"', "Did you mean stores.redis.url"),
        (f'[stores.redis]\nurl = ["{SECRET}"]', "stores.redis.url has an invalid value"),
        (f'[stores]\nredis = "{SECRET}"', r"expected a table: \[stores.redis\]"),
        (f'stores = "{SECRET}"', r"expected a table: \[stores\]"),
    ],
)
def test_a_mistake_in_such_a_section_is_refused_without_its_value(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises((InvalidConfig, UnknownSetting), match=told) as refused:
        load(written(tmp_path, text))
    assert SECRET not in str(refused.value)


def test_the_local_server_of_a_store_is_started_if_its_section_has_no_address(
    tmp_path: Path,
) -> None:
    assert "redis" not in Stack(load(tmp_path)).names
    assert "redis" in Stack(load(tmp_path, stores={"redis": {}})).names
    assert "redis" not in Stack(load(tmp_path, stores={"redis": {"url": "redis://a"}})).names


def test_without_its_program_redis_is_not_started_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_name, **_path: None)
    with pytest.raises(LocalStackError, match=r"everstate\[redis\]") as refused:
        RedisServer(load(tmp_path)).prepare({"client": 1})
    assert "stores.redis.url" in str(refused.value)
