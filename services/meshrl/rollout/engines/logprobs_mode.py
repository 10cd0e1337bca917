"""Whether an engine's logprobs are those of the distribution that its tokens were drawn from.

A loss weighs each token by r = p / q, the trainer's probability over the sampler's. Temperature, top-p, top-k and min-p
change the sampler's distribution, so q must be read after them ("processed"). With q before them ("raw", vLLM's
default) r is wrong at every token, and such sampling is refused before a token is drawn. The trainer divides its logits
by the temperature of each sample.

One bias stays: a cut distribution never draws the tokens that it dropped. On the kept tokens r = p / q' with the
renormalised q' is the right density ratio; gains and losses on the others are not seen. Only top_p = 1, top_k = 0,
min_p = 0 see everything.
"""

from __future__ import annotations

from meshrl.rollout.config import LogprobsMode
from meshrl.wire.types import Sampling

PROCESSED: LogprobsMode = "processed_logprobs"


def logprobs_mode_of(payload: object) -> str | None:
    """From the answer to GET /version; None if it is missing."""
    mode = payload.get("logprobs_mode") if isinstance(payload, dict) else None
    return mode if isinstance(mode, str) else None


def reshaping(sampling: Sampling) -> tuple[str, ...]:
    """Settings that make the sampled distribution differ from the model's, like "top_p = 0.9"."""
    active = {
        "temperature": sampling.temperature not in (None, 1.0),
        "top_p": sampling.top_p is not None and sampling.top_p < 1.0,
        "top_k": sampling.top_k is not None and sampling.top_k > 0,
        "min_p": sampling.min_p is not None and sampling.min_p > 0.0,
    }
    # Single precision travels on the wire: 0.9 came as 0.89999998.
    return tuple(f"{name} = {getattr(sampling, name):.6g}" for name, on in active.items() if on)
