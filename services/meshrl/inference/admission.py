"""Which requests an engine takes; the same for every engine, checked before a request reaches it."""

from __future__ import annotations

from meshrl.inference.engine import Engine, GenerateRequest
from meshrl.wire.errors import MeshError, Reason

RETRY_AFTER_S = 1.0


def check_request(engine: Engine, request: GenerateRequest, *, capacity: int, vocab_size: int) -> None:
    """Refuses what the engine cannot serve; `capacity` is how many requests may be in flight.

    Raises: MeshError DRAINING, VERSION_NOT_AVAILABLE and OVERLOADED for the engine's state, INVALID_REQUEST for what
    the request asks.
    """
    if engine.draining:
        raise MeshError(Reason.DRAINING, "this engine is shutting down; use another one")
    if engine.version is None:
        message = "this engine has no weight version yet; it serves once its agent has applied one"
        raise MeshError(Reason.VERSION_NOT_AVAILABLE, message, retry_after_s=RETRY_AFTER_S)
    if engine.in_flight >= capacity:
        raise MeshError(
            Reason.OVERLOADED,
            f"{capacity} requests are running or waiting here, which is all that may; retry, or raise max_queue",
            retry_after_s=RETRY_AFTER_S,
        )
    length, limit = len(request.prompt_ids), engine.max_model_len
    if not 0 < length < limit:
        raise MeshError(
            Reason.INVALID_REQUEST,
            f"the prompt has {length} tokens; it needs at least 1 and at most {limit - 1}, one less than the maximum "
            f"context length of {limit} tokens",
        )
    if not (min(request.prompt_ids) >= 0 and max(request.prompt_ids) < vocab_size):
        raise MeshError(Reason.INVALID_REQUEST, f"prompt token ids must be in [0, {vocab_size})")
    if not all(0 <= token < vocab_size for token in request.sampling.stop_token_ids):
        raise MeshError(Reason.INVALID_REQUEST, f"stop_token_ids must be in [0, {vocab_size})")
    if request.sampling.max_tokens < 1:
        raise MeshError(Reason.INVALID_REQUEST, f"max_tokens must be at least 1, got {request.sampling.max_tokens}")
