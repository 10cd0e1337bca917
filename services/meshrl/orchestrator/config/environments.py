"""The environments of a run, as the `orchestrator` section lists them."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import (
    GROUP_SIZE_SPELLINGS,
    EnvConfig,
    NumExamples,
    SamplingConfig,
    refuse_repeated_names,
)
from meshrl.orchestrator.config.algorithms import AlgoConfig


class RunEnvConfig(EnvConfig):
    """One environment of a run."""

    local: bool = True
    """Hosted by the rollout program that rl starts. False: by a service of orchestrator.services.rollout; it need not
    be installed here."""


class TrainEnvConfig(RunEnvConfig):
    """One environment that training draws tasks from."""

    group_size: int | None = Field(default=None, ge=1, validation_alias=GROUP_SIZE_SPELLINGS)
    """Rollouts per task here, at least 2 where they are compared; None takes orchestrator.group_size."""

    algo: AlgoConfig | None = None
    """The algorithm of this environment; None takes orchestrator.algo."""


class TrainEnvsConfig(BaseConfig):
    """The environments that training draws tasks from."""

    env: list[TrainEnvConfig] = Field(default_factory=list)
    """Training environments, mixed by their ratio; at least one. A rollout service must host each name."""

    follow_mixture: bool = False
    """Draw so that the groups that are trained have the ratios, not those that were begun: another of its environment
    replaces a group dropped for zero signal, lost or too old. An environment is drawn at most four times as often as
    its ratio asks for, lest one without any signal takes over."""


class EvalEnvConfig(RunEnvConfig):
    """One environment for evaluations. A key that is None is taken from `eval`."""

    interval: int | None = Field(default=None, ge=1)
    """Evaluate this environment after every so many steps; None takes eval.interval."""

    num_examples: NumExamples | None = None
    """Tasks of this environment, from the first on. -1 takes all, None eval.num_examples."""

    group_size: int | None = Field(default=None, ge=1, validation_alias=GROUP_SIZE_SPELLINGS)
    """Rollouts per task: the k of avg@k and pass@k; None takes eval.group_size."""


class EvalConfig(BaseConfig):
    """Evaluations during a run."""

    interval: int = Field(default=100, ge=1)
    """Evaluate after every so many steps."""

    env: list[EvalEnvConfig] = Field(default_factory=list)
    """Evaluation environments; at least one. Training environments may be named again."""

    num_examples: NumExamples = -1
    """Tasks per environment, from the first on; -1 takes all."""

    group_size: int = Field(default=1, ge=1, validation_alias=GROUP_SIZE_SPELLINGS)
    """Rollouts per task: the k of avg@k and pass@k. The older spelling rollouts_per_example is accepted."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of evaluations; an unset value takes the environment's default."""

    eval_base: bool = True
    """Evaluate version 0 before the first step."""

    eval_final: bool = True
    """Evaluate the last version after the last step."""

    pass_threshold: float = 1.0
    """Least reward of a rollout that passes; pass@k counts tasks with a passing rollout."""

    max_inflight_rollouts: int = Field(default=256, ge=1)
    """Most evaluation rollouts in flight at once."""

    @model_validator(mode="after")
    def _has_environments(self) -> Self:
        if not self.env:
            raise ValueError(
                "orchestrator.eval.env must name at least one environment, got none; add [[orchestrator.eval.env]]"
            )
        refuse_repeated_names(self.env, "orchestrator.eval.env", "give each [[orchestrator.eval.env]] its own name")
        return self

    def interval_of(self, env: EvalEnvConfig) -> int:
        return self.interval if env.interval is None else env.interval

    def num_examples_of(self, env: EvalEnvConfig) -> int:
        return self.num_examples if env.num_examples is None else env.num_examples

    def group_size_of(self, env: EvalEnvConfig) -> int:
        return self.group_size if env.group_size is None else env.group_size
