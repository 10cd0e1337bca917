"""W3C trace context as text."""

import pytest
from opentelemetry import context, trace

from meshrl.wire import trace as wire_trace

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_context_round_trips_through_text():
    span_context = wire_trace.parse_traceparent(HEADER)
    assert span_context is not None
    assert span_context.is_remote
    assert wire_trace.format_traceparent(span_context) == HEADER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        HEADER[:-1],
        HEADER.upper(),
        "ff" + HEADER[2:],
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
    ],
)
def test_malformed_text_is_no_context(text):
    assert wire_trace.parse_traceparent(text) is None
    assert wire_trace.link_from(text) is None
    assert wire_trace.context_from(text) is None


def test_a_newer_format_with_more_fields_is_read():
    assert wire_trace.parse_traceparent("01" + HEADER[2:] + "-future") is not None


def test_nothing_is_current_outside_a_span():
    assert wire_trace.current_traceparent() == ""


def test_the_current_span_is_what_its_context_says():
    token = context.attach(wire_trace.context_from(HEADER))
    try:
        assert wire_trace.current_traceparent() == HEADER
    finally:
        context.detach(token)


def test_links_skip_what_is_malformed():
    links = wire_trace.links_from([HEADER, "", "x"])
    assert [format(link.context.span_id, "016x") for link in links] == ["b7ad6b7169203331"]
    assert isinstance(links[0], trace.Link)
