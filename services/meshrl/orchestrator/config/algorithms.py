"""The algorithms of a run, as the `orchestrator` section names them; `work.recipes` makes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import Addresses


class LengthPenaltyConfig(BaseConfig):
    """Reward that long rollouts lose before advantages are made. filters.zero_signal ignores it: a group of equal
    rewards is dropped, although its lengths differ."""

    type: Literal["overlong", "per_token"]
    """overlong: nothing up to max_length - buffer_length sampled tokens, then in proportion up to weight at max_length
    (DAPO, arXiv 2503.14476). per_token: weight for each sampled token."""

    weight: float = Field(ge=0.0)
    """overlong: the largest deduction, 1 in DAPO. per_token: the deduction per token, such as 1e-4."""

    max_length: int | None = Field(default=None, ge=1)
    """overlong: sampled tokens at which all of weight comes off; usually sampling.max_tokens."""

    buffer_length: int | None = Field(default=None, ge=1)
    """overlong: tokens before max_length over which the penalty grows."""

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
    """default: reward minus the group's mean. grpo: default over the group's standard deviation. rloo: reward minus the
    mean of the others. opo: reward minus the length-weighted mean. custom: your function."""

    length_penalty: LengthPenaltyConfig | None = None
    """Reward that long rollouts lose; None means none."""

    import_path: str | None = None
    """custom: `package.module.function`, called with a group's rewards and sampled lengths, arrays (G,)."""

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


class TeacherClientConfig(BaseConfig):
    """How a teacher is reached."""

    base_url: Annotated[
        list[str],
        Field(min_length=1),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = Field(default=["http://127.0.0.1:8001"])
    """Base URLs of servers of the teacher, with or without a trailing /v1."""

    api_key_var: str = "MESHRL_API_KEY"
    """Environment variable with the servers' bearer token; unset sends none."""

    call_deadline_s: float = Field(default=120.0, gt=0.0)
    """Longest time of one call."""

    failover_s: float = Field(default=60.0, gt=0.0)
    """How long a call is tried again, at any server, before the run ends."""

    @model_validator(mode="after")
    def _urls(self) -> Self:
        for url in self.base_url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"teacher.client.base_url must hold URLs like http://127.0.0.1:8001, got {url!r}")
        return self


class TeacherModelConfig(BaseConfig):
    """Which model the teacher is."""

    name: str = ""
    """Its name at the servers; empty leaves it out, for servers with one model."""


class TeacherConfig(BaseConfig):
    """A fixed model that the policy learns from. Its servers are started by hand."""

    client: TeacherClientConfig = TeacherClientConfig()
    """How it is reached."""

    model: TeacherModelConfig = TeacherModelConfig()
    """Which model it is."""

    rollout: Addresses | None = None
    """sft: host:port of rollout services in which the teacher plays (rollout.text_samples); rl starts one."""

    max_inflight: int = Field(default=64, ge=1)
    """Most calls for scores at once."""

    cache_tokens: int = Field(default=4_000_000, ge=0)
    """Tokens whose scores are cached; 4 bytes each, and 8 for each of algo.top_k."""


AlgoName = Literal["grpo", "max_rl", "rae", "hierarchical_grpo", "echo", "opd", "opsd", "sft", "custom"]

TAUGHT = frozenset({"opd", "sft"})
"""Algorithms that need a teacher."""

_KEYS_OF: dict[str, tuple[str, ...]] = {
    "rae": ("decay",),
    "hierarchical_grpo": ("episode_agents",),
    "echo": ("roles", "weight"),
    "opd": ("weight", "teacher", "top_k"),
    "opsd": ("weight", "context_tokens", "top_k", "teacher"),
    "sft": ("weight", "min_reward"),
    "custom": ("import_path", "kwargs", "teacher"),
}


class AlgoConfig(BaseConfig):
    """Who samples, what else is scored, and the terms of the objective."""

    type: AlgoName = "grpo"
    """grpo: advantages by orchestrator.advantage. max_rl: reward minus the mean, over the mean. rae: each agent against
    its own usual reward, for self-play. hierarchical_grpo: solvers compared within an episode, other agents between
    episodes. echo: grpo, and cross-entropy on the answers of tools. opd: the KL to a teacher on the policy's own
    tokens. opsd: the KL to the policy itself after the task's best rollout. sft: cross-entropy on rollouts that a
    teacher plays. custom: your class."""

    decay: float = Field(default=0.95, ge=0.0, lt=1.0)
    """rae: share of an agent's baseline kept at each rollout; it follows about the last 1 / (1 - decay)."""

    episode_agents: list[str] = Field(default=["solver"], min_length=1)
    """hierarchical_grpo: agents that are compared within one episode."""

    roles: list[Literal["system", "user", "tool"]] = Field(default=["tool"], min_length=1)
    """echo: whose messages are learned by cross-entropy."""

    weight: float | None = Field(default=None, gt=0.0)
    """echo, opd, opsd, sft: weight of their tokens in the ce or ref_kl term; None is 0.1 for echo, else 1."""

    context_tokens: int | None = Field(default=None, ge=2)
    """opsd: most tokens of a demonstration and the sample behind it, less than the engines' max_model_len; None is
    orchestrator.seq_len less one."""

    top_k: int = Field(default=0, ge=0, le=64)
    """opd, opsd: sum the KL over so many of the teacher's likeliest tokens, with all others as one: far less noise a
    step, for 8 bytes a token and candidate. 0 samples it."""

    min_reward: float | None = None
    """sft: learn only from rollouts of at least this reward; None takes all."""

    teacher: TeacherConfig | None = None
    """opd, custom: a teacher of this algorithm alone; None takes orchestrator.teacher. opsd: an engine with the run's
    first weights; None takes the current policy, which drifts."""

    import_path: str | None = None
    """custom: `package.module.Class`, a subclass of meshrl.algorithms.recipes.base.Recipe."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """custom: keyword arguments of the class."""

    @property
    def compares(self) -> bool:
        """Whether a group of one rollout teaches nothing."""
        return self.type in ("grpo", "max_rl", "opsd")

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
