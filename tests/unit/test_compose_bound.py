"""`make test-compose` fails when it is too slow, whatever else went well."""

import pytest

from tests.compose.__main__ import judged


def test_more_than_fifteen_minutes_after_the_image_was_built_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(900.0) == 0
    assert judged(931.2) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("FAILED")
    assert "931 s after the image was built, and may take 900" in said
