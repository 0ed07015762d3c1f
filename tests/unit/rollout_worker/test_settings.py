"""What a worker's settings refuse before anything boots."""

import pytest

from ebbtide import settings
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import service
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.runtime import Shutdown
from tests.fakes.scripted_settings import ENGINE


def read(url: str) -> WorkerSettings:
    return settings.read(WorkerSettings, prog="ebbtide serve rollout-worker", argv=["--metadata-url", url], environ={})


@pytest.mark.parametrize("url", ["ftp://169.254.169.254", "169.254.169.254", "file:///etc/passwd", "http://"])
def test_a_metadata_server_that_cannot_be_asked_over_http_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(url)
    assert refused.value.field == "--metadata-url"


@pytest.mark.parametrize("url", ["http://169.254.169.254", "https://metadata.internal:8443/", "http://[fd00:ec2::254]"])
def test_a_metadata_server_of_a_cloud_is_taken(url: str) -> None:
    assert read(url).metadata_url == url


@pytest.mark.parametrize(("field", "value"), [("coordinator", "127.0.0.1:1,,b:2"), ("relay", "nowhere")])
async def test_a_wrong_address_is_said_before_the_engine_starts(
    field: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a large model that is minutes earlier."""
    settings = WorkerSettings(engine=ENGINE, mirror_dir="", **{field: value})  # type: ignore[arg-type]
    monkeypatch.setattr(service, "make_engine", lambda *_: pytest.fail("an engine was made"))
    with pytest.raises(InvalidRequest) as refused:
        await service.serve(Shutdown("worker", settings), settings)
    assert refused.value.field == field
