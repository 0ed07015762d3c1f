"""URLs of stores: what is wrong is refused by name, and no message shows a password."""

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.store.dialer import dialer


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@host:6379/0",
        "redis://user:se@cret@host:6379/0",
        "redis://host:6379/0?password=secret",
        "redis://host:6379/0?password=se@cret",
        "redis+sentinel://host/service?sentinel_password=secret",
        "redis+sentinel://host/service?sentinel_password=se@cret",
        "redis+sentinel://user:cret@host/service?sentinel_password=sec@ret",
    ],
)
def test_no_password_is_in_the_name_of_a_store(url: str) -> None:
    where = dialer(url).where
    assert not any(part in where for part in ("sec", "cret", "user", "password"))


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://[secret/service",
        "redis+sentinel://user:secret@[host/service",
        "redis+sentinel://host:0/service",
        "redis+sentinel://host:99999/service",
        "redis+sentinel://host:port/service",
        "redis+sentinel://host",
        "redis+sentinel://host/service/x",
        "redis+sentinel://host/service?else=secret",
        "redis://[host",
        "redis://user:secret?cret@host",
        "redis://host:99999",
        "http://user:secret@host",
        "secret@host",
    ],
)
def test_a_store_url_that_cannot_be_is_refused_by_field(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^store_url: .* cannot be used") as refused:
        dialer(url)
    assert "user" not in str(refused.value)
    assert "secret" not in str(refused.value) or "[secret" in url
