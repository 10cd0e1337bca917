"""The staleness law: what may be generated and what may be trained on; used by the plan, decided nowhere else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StalenessLaw:
    """Bounds how far generation runs ahead of training and how old trained tokens are.

    Train step n (from 1) turns version n - 1 into version n. With k = max_async_level and m = max_off_policy_steps:

        admission   work for step n starts only while the active version is at least max(0, n - 1 - k)
        use         step n trains a rollout only while (n - 1) - oldest_version <= m

    k = 0 is synchronous on-policy training.
    """

    max_async_level: int
    max_off_policy_steps: int

    def __post_init__(self) -> None:
        if self.max_async_level < 0 or self.max_off_policy_steps < 0:
            raise ValueError(
                "max_async_level and max_off_policy_steps must not be negative,"
                f" got {self.max_async_level} and {self.max_off_policy_steps}"
            )

    @property
    def synchronous(self) -> bool:
        return self.max_async_level == 0

    def required_version(self, step: int) -> int:
        return max(0, step - 1 - self.max_async_level)

    def admits(self, *, step: int, active_version: int) -> bool:
        """True when work for `step` may start."""
        return active_version >= self.required_version(step)

    def newest_admissible_step(self, active_version: int) -> int:
        return active_version + 1 + self.max_async_level

    def staleness(self, *, step: int, oldest_version: int) -> int:
        """Versions between the policy that `step` trains and the oldest one that sampled a token."""
        return (step - 1) - oldest_version

    def usable(self, *, step: int, oldest_version: int) -> bool:
        """True when `step` may train a rollout whose oldest token is from `oldest_version`."""
        return self.staleness(step=step, oldest_version=oldest_version) <= self.max_off_policy_steps
