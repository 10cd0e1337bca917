"""Judges probes: whether an engine computes with the weights of the version that it has just applied. No I/O.

Digests show that bytes are right, not that every kernel, index and packed copy follows them. A manifest has the
trainer's logprobs of a fixed prompt, from which the engine's must not be far. The usual distance depends on types,
kernels, quantisation and routers, so it is learned from the first versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionProbe

LEARNED_FROM = 8  # versions
KNOWN_AFTER = 3  # versions
TIMES_USUAL = 8.0
LEAST_BOUND = 0.05  # nats: below, nothing is worth a refusal
SHARE_OF_SPREAD = 0.5  # of the logprobs' mean distance from their mean: other weights give about all of it


class ProbeRule:
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
        """The mean distance in nats of logprobs (P,) from the probe's first P, of the worst copy of the model.

        Raises MeshError ENGINE_FAILED above the bound.
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
