"""The traces of a version: its upload, and `rl.sync` from the seal to the last engine with each engine's times."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context

from meshrl.core.telemetry.tracing import SYNC_PAUSE_SPAN, SYNC_PREPARE_SPAN, SYNC_SPAN, chosen_ids
from meshrl.wire.trace import link_from, sync_context
from meshrl.wire.types import Activation, Manifest


def describe(manifest: Manifest, artifact: str) -> None:
    attributes: dict[str, str | int] = {
        "meshrl.run_id": manifest.run_id,
        "meshrl.version": manifest.version,
        "meshrl.artifact_id": artifact,
        "meshrl.kind": manifest.kind.value,
        "meshrl.full_bytes": manifest.num_bytes,
    }
    if manifest.base_version is not None:
        attributes["meshrl.base_version"] = manifest.base_version
    trace.get_current_span().set_attributes(attributes)


def record_sync(tracer: trace.Tracer, answer: Activation, wall_s: float) -> None:
    """Writes the spans of a commit that ended at `wall_s`, linked to the train span that made the version.

    Engines report durations only, so a prepare is drawn from the seal on, or up to the pause where it began before the
    seal, and a pause up to the end.
    """
    sealed_s = wall_s - answer.lag_s
    link = link_from(answer.version.traceparent)
    links = [link] if link is not None else []
    roots = {engine.applied.root for engine in answer.engines}
    own = sync_context(answer.version.version, roots.pop()) if len(roots) == 1 else None
    with chosen_ids(own):  # whoever samples from the version links to it before it is over
        sync = tracer.start_span(SYNC_SPAN, context=Context(), links=links, start_time=_ns(sealed_s))
    sync.set_attributes(
        {
            "meshrl.run_id": answer.version.run_id,
            "meshrl.version": answer.version.version,
            "meshrl.artifact_id": answer.version.artifact_id,
            "meshrl.num_bytes": answer.version.num_bytes,
            "meshrl.transport": answer.version.transport.value,
            "meshrl.commit_s": answer.commit_s,
            "meshrl.lag_s": answer.lag_s,
        }
    )
    inside = trace.set_span_in_context(sync)
    for engine in answer.engines:
        attributes: dict[str, str | int] = {
            "meshrl.engine_id": engine.engine_id,
            "meshrl.requests_kept": engine.applied.requests_kept,
        }
        paused_s = wall_s - engine.applied.pause_s
        prepared_s = min(sealed_s + engine.applied.prepare_s, paused_s)
        began_s = prepared_s - engine.applied.prepare_s
        prepare = tracer.start_span(SYNC_PREPARE_SPAN, context=inside, start_time=_ns(began_s), attributes=attributes)
        prepare.end(_ns(prepared_s))
        pause = tracer.start_span(SYNC_PAUSE_SPAN, context=inside, start_time=_ns(paused_s), attributes=attributes)
        pause.end(_ns(wall_s))
    sync.end(_ns(wall_s))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
