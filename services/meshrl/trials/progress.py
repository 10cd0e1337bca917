"""Shows how many rollouts are done."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loguru import logger
from tqdm import tqdm

from meshrl.trials.plan import TaskSpan

SAY_EVERY_S = 10.0


@dataclass
class _Count:
    total: int
    before: int
    """Done by an earlier process."""
    done: int = 0
    failed: int = 0
    reward: float = 0.0


class TrialProgress:
    """Counts rollouts of one checkpoint: a bar for each environment in a terminal, else lines in the log."""

    def __init__(self, title: str, spans: Sequence[TaskSpan], before: Mapping[str, int]) -> None:
        self._title = title
        self._began_s = self._said_s = time.monotonic()
        self._counts = {span.environment: _Count(span.rollouts, before.get(span.environment, 0)) for span in spans}
        self._bars: dict[str, tqdm[None]] = {}
        if sys.stderr.isatty():
            for place, (name, count) in enumerate(self._counts.items()):
                label = f"{title} {name}"
                self._bars[name] = tqdm(
                    total=count.total, initial=count.before, desc=label, position=place, unit="rollout", leave=True
                )

    def ended(self, environment: str, reward: float | None) -> None:
        count = self._counts[environment]
        if reward is None:
            count.failed += 1
        else:
            count.done += 1
            count.reward += reward
        bar = self._bars.get(environment)
        if bar is not None:
            bar.set_postfix(reward=f"{count.reward / max(1, count.done):.3f}", failed=count.failed, refresh=False)
            bar.update(1)
        elif time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            logger.info("{}", self.line())

    def line(self) -> str:
        took_s = max(1e-9, time.monotonic() - self._began_s)
        ended = sum(count.done + count.failed for count in self._counts.values())
        left = sum(count.total - count.before - count.done - count.failed for count in self._counts.values())
        rate = ended / took_s
        parts = [
            f"{name} {count.before + count.done}/{count.total}"
            + (f" ({count.failed} failed)" if count.failed else "")
            + (f", reward {count.reward / count.done:.3f}" if count.done else "")
            for name, count in self._counts.items()
        ]
        rest = f", {left / rate:.0f} s left" if rate > 0 else ""
        return f"{self._title} | {' | '.join(parts)} | {rate:.1f} rollouts/s{rest}"

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()
        logger.info("{}", self.line())
