"""W3C trace context as text, for gRPC metadata, HTTP headers, queues and restarts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
_W3C = TraceContextTextMapPropagator()


def format_traceparent(span_context: trace.SpanContext) -> str:
    """An invalid context is "" as text."""
    if not span_context.is_valid:
        return ""
    return f"00-{span_context.trace_id:032x}-{span_context.span_id:016x}-{int(span_context.trace_flags):02x}"


def sync_context(version: int, root: bytes) -> trace.SpanContext:
    """Of the span of a commit. Hub, engines and rollouts compute it alike, and can link to it before the commit
    ends."""
    digest = hashlib.blake2b(b"rl.sync" + version.to_bytes(8, "little") + root, digest_size=24).digest()
    return trace.SpanContext(
        trace_id=int.from_bytes(digest[:16], "little"),
        span_id=int.from_bytes(digest[16:], "little"),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )


def current_traceparent() -> str:
    return format_traceparent(trace.get_current_span().get_span_context())


def parse_traceparent(traceparent: str) -> trace.SpanContext | None:
    """None for an empty or malformed text."""
    span_context = trace.get_current_span(_W3C.extract({TRACEPARENT: traceparent})).get_span_context()
    return span_context if span_context.is_valid else None


def trace_id_of(traceparent: str) -> str:
    """In hexadecimal; "" for an empty or malformed text."""
    span_context = parse_traceparent(traceparent)
    return "" if span_context is None else f"{span_context.trace_id:032x}"


def context_from(traceparent: str) -> context.Context | None:
    """For children of the remote span. None without one."""
    return _W3C.extract({TRACEPARENT: traceparent}) or None


def link_from(traceparent: str) -> trace.Link | None:
    """None for an empty or malformed text."""
    span_context = parse_traceparent(traceparent)
    return None if span_context is None else trace.Link(span_context)


def links_from(traceparents: Iterable[str]) -> list[trace.Link]:
    return [link for link in map(link_from, traceparents) if link is not None]
