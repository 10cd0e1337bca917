"""Judges probes: whether an engine computes with the weights of the version that it has just applied.

Digests show that a version's bytes are right, not that every kernel, index and packed copy of the engine follows them.
The manifest of a version has the trainer's logprobs of a fixed prompt; an engine that scores it far from those serves
something else. The usual distance depends on types, kernels, quantisation and routers, so the rule learns it from the
first versions. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionProbe

LEARNED_FROM = 8
"""Versions whose errors are what is usual."""

KNOWN_AFTER = 3
"""Versions after which the usual error is known well enough."""

TIMES_USUAL = 8.0
LEAST_BOUND = 0.05  # nats: below, nothing is worth a refusal
SHARE_OF_SPREAD = 0.5
"""Of the logprobs' mean distance from their mean: other weights give about all of it."""


class ProbeRule:
    """The bound of one engine's probes on the versions of one run: fixed, or from the first versions."""

    def __init__(self, bound: float | Literal["auto"] = "auto") -> None:
        self._fixed = None if bound == "auto" else bound
        self._usual: list[float] = []

    def bound(self, probe: VersionProbe) -> float:
        """In nats."""
        if self._fixed is not None:
            return self._fixed
        if len(self._usual) >= KNOWN_AFTER:
            return max(LEAST_BOUND, TIMES_USUAL * max(self._usual))
        logprobs = np.array(probe.logprobs)
        return max(LEAST_BOUND, SHARE_OF_SPREAD * float(np.abs(logprobs - logprobs.mean()).mean()))

    def judge(self, probe: VersionProbe, scored: Sequence[NDArray[np.float32]]) -> float:
        """The mean distance in nats of logprobs (P,) from the probe's, of the worst copy of the model.

        Fewer than the probe's are compared with as many of its first. Raises MeshError ENGINE_FAILED above the bound.
        """
        errors = [np.abs(each[1:] - probe.logprobs[: len(each) - 1]).mean(dtype=np.float64) for each in scored]
        error = float(np.max(errors))
        bound = self.bound(probe)
        if not error <= bound:  # one that is not a number as well
            usual = f", and at most {max(self._usual):.2g} were usual" if self._usual else ""
            raise MeshError(
                Reason.ENGINE_FAILED,
                f"its logprobs of the version's probe are {error:.3g} nats a token from the trainer's, above the bound"
                f" of {bound:.3g}{usual}: its bytes are right, but the engine does not compute with them. It is loaded"
                " anew; should that not help, restart the engine, or raise weight_broadcast.max_probe_error where its"
                " kernels are known to differ as much",
            )
        if len(self._usual) < LEARNED_FROM:
            self._usual.append(error)
        return error
