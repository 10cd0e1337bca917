"""Checks at the start of a run that engines and trainer compute the same logprobs.

The trainer computes the logprob of every sampled token again, before its optimizer moves. For tokens of the version
that the step trains, only rounding may differ.
"""

from __future__ import annotations

from collections.abc import Mapping

from loguru import logger

from meshrl.orchestrator.config import LogprobCheckConfig
from meshrl.sampling.retry import RunError
from meshrl.wire.types import StepEvent


class LogprobCheck:
    """Checks the first step of this process whose tokens are all of the trainer's own version."""

    def __init__(self, config: LogprobCheckConfig) -> None:
        self._config = config
        self._done = False

    def check(self, event: StepEvent, staleness: Mapping[str, float]) -> None:
        """Takes a step that is DONE, and the `off_policy/all/max` of its batch. Raises RunError when they differ, if
        that is fatal."""
        mean, most = (event.metrics.get(f"mismatch_abs/all/{of}") for of in ("mean", "max"))
        if self._done or mean is None or most is None or staleness.get("off_policy/all/max") != 0:
            return
        self._done = True
        found = (
            f"logprobs of step {event.step}'s tokens by the engines and by the trainer differ by {mean:.2g} nats on "
            f"average, {most:.2g} at most"
        )
        if mean <= self._config.max_mean_abs:
            logger.info("{}: they agree", found)
            return
        message = (
            f"{found}, though both are of version {event.step - 1}; more than {self._config.max_mean_abs:g} "
            "(orchestrator.logprob_check.max_mean_abs) is no rounding, and what is trained is not what was sampled. "
            "Look whether inference.model and trainer.model name the same weights and numbers (dtype), whether "
            "sampling is cut (top_p, top_k, min_p), whether the model has dropout in its configuration, and whether "
            "the other inference.engine gives the same"
        )
        if self._config.fatal:
            raise RunError(f"{message}; orchestrator.logprob_check.fatal = false trains nevertheless")
        logger.warning("{}", message)
