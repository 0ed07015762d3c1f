"""The codecs that must agree."""

from collections.abc import Callable

import pytest

from ebbtide.weights.patch import TileCodec


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def codec_of(request: pytest.FixtureRequest) -> Callable[[int], TileCodec]:
    if request.param:
        pytest.importorskip("numba")
    return lambda width: TileCodec(width, compiled=request.param)
