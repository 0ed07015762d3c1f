"""The table of statuses covers the whole tree of exceptions, in both directions."""

import logging

import grpc
import pytest
from grpc import StatusCode

from ebbtide import errors
from ebbtide.errors import EbbtideError, Internal, InvalidRequest, NoCapacity, Unavailable
from ebbtide.rpc.status_table import CODES, from_rpc_error, to_status, translated
from ebbtide.store.records import WritesRefused

TREE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EbbtideError) and kind is not EbbtideError
]


def sent_over(error: Exception) -> EbbtideError:
    """What a client makes of what a server makes of `error`."""
    status = to_status(error)
    trailing = grpc.aio.Metadata(*status.metadata)
    return from_rpc_error(grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details))


def test_a_refused_write_arrives_by_the_name_that_the_former_release_knows() -> None:
    assert type(sent_over(WritesRefused("full"))) is errors.StoreUnavailable


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_exception_arrives_as_what_it_was(kind: type[EbbtideError]) -> None:
    arrived = sent_over(kind("what to do"))
    assert type(arrived) is kind
    assert str(arrived) == "what to do" or kind is Internal  # whose text stays in the log
    assert any(issubclass(kind, known) for known in CODES)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidRequest, StatusCode.INVALID_ARGUMENT),
        (errors.LeaseSuperseded, StatusCode.ABORTED),
        (errors.VersionUnavailable, StatusCode.FAILED_PRECONDITION),
        (errors.NoCapacity, StatusCode.RESOURCE_EXHAUSTED),
        (errors.StoreUnavailable, StatusCode.UNAVAILABLE),
        (errors.ChunkCorrupt, StatusCode.DATA_LOSS),
    ],
)
def test_statuses_are_those_of_the_design(kind: type[EbbtideError], code: StatusCode) -> None:
    assert to_status(kind("text")).code is code


@pytest.mark.parametrize("error", [KeyError("secret"), Internal("secret")], ids=["outside", "internal"])
def test_what_callers_can_do_nothing_about_is_logged_under_the_id_that_is_sent(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        status = to_status(error)
    assert status.code is StatusCode.INTERNAL
    assert "secret" not in status.details
    assert caplog.records[0].error_id in status.details  # type: ignore[attr-defined] # by extra


def test_trailing_metadata_is_ascii_whatever_the_field_is_called() -> None:
    status = to_status(InvalidRequest("bad", field="schlüssel\r\nx: y"))
    assert all(value.isascii() and value.isprintable() for _, value in status.metadata)
    arrived = sent_over(InvalidRequest("bad", field="schlüssel\r\nx: y"))
    assert isinstance(arrived, InvalidRequest)
    assert (arrived.field, arrived.text) == ("schlüssel\r\nx: y", "bad")


def test_a_field_and_its_text_arrive_apart_and_a_status_shows_both() -> None:
    status, arrived = to_status(sent := InvalidRequest("n is too large", field="n")), sent_over(sent)
    assert status.details == str(arrived) == "n: n is too large"
    assert isinstance(arrived, InvalidRequest)
    assert (arrived.field, arrived.text) == ("n", "n is too large")


def test_retry_after_survives_and_garbage_in_it_does_not_hurt() -> None:
    arrived = sent_over(NoCapacity("full", retry_after_s=0.125))
    assert isinstance(arrived, NoCapacity)
    assert arrived.retry_after_s == 0.125
    trailing = grpc.aio.Metadata(("ebbtide-error", "NoCapacity"), ("retry-after-ms", "soon"))
    error = grpc.aio.AioRpcError(StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing, "full")
    arrived = from_rpc_error(error)
    assert isinstance(arrived, NoCapacity)
    assert arrived.retry_after_s == 1.0


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (StatusCode.UNAVAILABLE, "connection refused", Unavailable),
        (StatusCode.DEADLINE_EXCEEDED, "", Unavailable),
        (StatusCode.CANCELLED, "", Unavailable),
        (StatusCode.UNIMPLEMENTED, "", Internal),
        (StatusCode.UNKNOWN, "", Internal),
        (StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)", InvalidRequest),
        (StatusCode.RESOURCE_EXHAUSTED, "received metadata size exceeds soft limit", InvalidRequest),
        (StatusCode.RESOURCE_EXHAUSTED, "quota of a proxy", NoCapacity),
        (StatusCode.UNAUTHENTICATED, "by a proxy", errors.Unauthenticated),
    ],
)
def test_what_grpc_itself_reports_names_service_and_target(
    code: StatusCode, text: str, kind: type[EbbtideError]
) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)
    with pytest.raises(kind, match=r"relay at 10\.0\.0\.1:7610"), translated("relay", "10.0.0.1:7610"):
        raise error


def test_a_name_that_is_no_exception_of_ours_is_not_believed() -> None:
    trailing = grpc.aio.Metadata(("ebbtide-error", "SystemExit"))
    error = grpc.aio.AioRpcError(StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing, "gone")
    assert type(from_rpc_error(error)) is errors.NotFound
