"""The algorithms of a run, as the `orchestrator` section names them; `work.recipes` makes them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig


class LengthPenaltyConfig(BaseConfig):
    """What long rollouts lose of their reward before advantages are made.

    It does not count for filters.zero_signal: a group of equal rewards is dropped, although its lengths differ.
    """

    type: Literal["overlong", "per_token"]
    """overlong: nothing up to max_length - buffer_length sampled tokens, then in proportion, weight from max_length on
    (the soft overlong punishment of DAPO, arXiv 2503.14476); per_token: weight for each sampled token."""

    weight: float = Field(ge=0.0)
    """overlong: the most that comes off, 1 in DAPO; per_token: what comes off for each token, 1e-4 for example."""

    max_length: int | None = Field(default=None, ge=1)
    """overlong: sampled tokens at which the whole weight comes off; usually sampling.max_tokens."""

    buffer_length: int | None = Field(default=None, ge=1)
    """overlong: the last so many tokens before max_length over which the penalty grows."""

    @model_validator(mode="after")
    def _lengths_of_this_type(self) -> Self:
        where = "orchestrator.advantage.length_penalty"
        lengths = (self.max_length, self.buffer_length)
        if self.type == "overlong":
            if self.max_length is None or self.buffer_length is None or self.buffer_length > self.max_length:
                raise ValueError(
                    f"{where}: type overlong needs max_length and a buffer_length of at most that, got {lengths[0]} and"
                    f" {lengths[1]}; 20480 and 4096 are those of DAPO"
                )
        elif lengths != (None, None):
            raise ValueError(f"{where}: max_length and buffer_length belong to type overlong; leave them out")
        return self


class AdvantageConfig(BaseConfig):
    """How rewards of a group become advantages."""

    type: Literal["default", "grpo", "rloo", "opo", "custom"] = "default"
    """default: reward minus the group's mean; grpo: that over the group's standard deviation; rloo: reward minus the
    mean of the others; opo: reward minus the length-weighted mean; custom: a function of yours."""

    length_penalty: LengthPenaltyConfig | None = None
    """What long rollouts lose of their reward; None means nothing."""

    import_path: str | None = None
    """custom: `package.module.function`, called with the rewards and sampled lengths of a group, arrays (G,)."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """custom: keyword arguments of the function."""

    @model_validator(mode="after")
    def _keys_of_this_type(self) -> Self:
        if self.type == "custom" and self.import_path is None:
            raise ValueError(
                "orchestrator.advantage.type custom needs orchestrator.advantage.import_path: the"
                " package.module.function that makes the advantages"
            )
        if self.type != "custom" and (self.import_path is not None or self.kwargs):
            raise ValueError(
                "orchestrator.advantage.import_path and kwargs belong to type custom, not to"
                f" {self.type}; leave them out, or set orchestrator.advantage.type to custom"
            )
        return self


AlgoName = Literal["grpo", "max_rl", "rae", "hierarchical_grpo", "echo", "custom"]

_KEYS_OF: dict[str, tuple[str, ...]] = {
    "rae": ("decay",),
    "hierarchical_grpo": ("episode_agents",),
    "echo": ("roles", "weight"),
    "custom": ("import_path", "kwargs"),
}
"""Keys that only some types have."""


class AlgoConfig(BaseConfig):
    """An algorithm: who samples, what else is scored, and which terms of the objective its rollouts have."""

    type: AlgoName = "grpo"
    """grpo: advantages by orchestrator.advantage; max_rl: reward minus the mean, over the mean; rae: each agent against
    its own usual reward, for self-play; hierarchical_grpo: solvers compared within an episode, other agents between
    episodes; echo: grpo, and cross-entropy on what tools answer; custom: one of yours."""

    decay: float = Field(default=0.95, ge=0.0, lt=1.0)
    """rae: how much of an agent's baseline stays with each rollout; it follows about its last 1 / (1 - decay)."""

    episode_agents: list[str] = Field(default=["solver"], min_length=1)
    """hierarchical_grpo: agents that are compared within one episode."""

    roles: list[Literal["system", "user", "tool"]] = Field(default=["tool"], min_length=1)
    """echo: whose messages are learned by cross-entropy."""

    weight: float = Field(default=0.1, gt=0.0)
    """echo: weight of their tokens in the ce term."""

    import_path: str | None = None
    """custom: `package.module.Class`, a subclass of meshrl.algorithms.recipes.base.Recipe."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """custom: keyword arguments of the class."""

    @property
    def least_rollouts(self) -> int:
        """Of a group that loses some; a custom algorithm says it of its class, and is asked once a run goes on."""
        return 2 if self.compares else 1

    @property
    def compares(self) -> bool:
        """Whether a group of one rollout has nothing to learn from."""
        return self.type in ("grpo", "max_rl")

    @model_validator(mode="after")
    def _keys_of_its_type(self) -> Self:
        others = {key for keys in _KEYS_OF.values() for key in keys} - set(_KEYS_OF.get(self.type, ()))
        given = {
            key
            for key in others
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)
        }
        if foreign := sorted(given):
            raise ValueError(
                f"algo: {', '.join(foreign)} belongs to another type than {self.type!r}; leave it out, or set algo.type"
            )
        if self.type == "custom" and self.import_path is None:
            raise ValueError("algo.type custom needs algo.import_path: the package.module.Class that is the algorithm")
        return self
