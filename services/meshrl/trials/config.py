"""The keys that `eval` and `synthesize` share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config import BaseConfig
from meshrl.core.config.shared import (
    GROUP_SIZE_SPELLINGS,
    EnvConfig,
    NumExamples,
    ServerConfig,
    refuse_repeated_names,
)
from meshrl.inference.config import InferenceConfig
from meshrl.rollout.config import ClientConfig, PlayConfig, RolloutConfig
from meshrl.wire.values import JsonObject

DEFAULT_SEQ_LEN = 2048


class TrialEnvConfig(EnvConfig):
    """One environment to play. A key that is None is taken from the key of the same name above it."""

    num_examples: NumExamples | None = None
    """Tasks of this environment, from the first on. -1 takes all, None takes num_examples."""

    group_size: int | None = Field(default=None, ge=1, validation_alias=GROUP_SIZE_SPELLINGS)
    """Rollouts per task. None takes group_size."""


class TrialDeadlinesConfig(BaseConfig):
    """Longest waits, in seconds."""

    startup_s: float = Field(default=60.0, gt=0.0)
    """For servers of client.base_url to answer, from the first look on."""

    engine_startup_s: float = Field(default=1800.0, gt=0.0)
    """For the engine that is started here; a large model loads and compiles for minutes."""

    environments_s: float = Field(default=600.0, gt=0.0)
    """For the environments to be loaded."""

    rollout_s: float = Field(default=3600.0, gt=0.0)
    """For one rollout, its wait for a place included."""

    load_s: float = Field(default=1800.0, gt=0.0)
    """For an engine to load the weights of one checkpoint."""


class TrialsConfig(PlayConfig):
    """Plays tasks of environments with a fixed model and keeps every rollout; the same command continues."""

    keeps_conversations: ClassVar[bool] = False
    """Whether rollouts are to hold their messages."""

    environment_ids: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Tasksets to play by default settings, beside those of env."""

    env: list[TrialEnvConfig] = Field(default_factory=list)
    """Environments to play with their settings."""

    num_examples: NumExamples = -1
    """Tasks per environment, from the first on; -1 takes all."""

    group_size: int = Field(default=1, ge=1, validation_alias=GROUP_SIZE_SPELLINGS)
    """Rollouts per task. The older spelling rollouts_per_example is accepted."""

    seed: int = 0
    """Seed of sampling, as in the evaluations of a run: a task's rollouts have the same seeds for every model."""

    client: ClientConfig = ClientConfig()
    """The servers to sample from. Without client.api they are asked for their kind: a meshrl engine samples tokens, any
    other server answers /v1/chat/completions."""

    inference: InferenceConfig | None = None
    """The engine to start, and to end afterwards. None: the servers of client.base_url run already."""

    attempts: int = Field(default=3, ge=1)
    """Tries of a rollout whose failure may pass."""

    seq_len: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens. None takes the engine's limit."""

    deadlines: TrialDeadlinesConfig = TrialDeadlinesConfig()
    """Longest waits for other programs."""

    output_dir: Path = Path("outputs")
    """Folder for results and logs. Results of the same settings are continued."""

    clean_output_dir: bool = False
    """Delete the results in output_dir, and begin anew."""

    @property
    def environments(self) -> tuple[TrialEnvConfig, ...]:
        """Those of environment_ids first."""
        return (*(TrialEnvConfig(id=name, part="eval") for name in self.environment_ids), *self.env)

    def group_size_of(self, env: TrialEnvConfig) -> int:
        return self.group_size if env.group_size is None else env.group_size

    def num_examples_of(self, env: TrialEnvConfig) -> int:
        return self.num_examples if env.num_examples is None else env.num_examples

    def result_settings(self, **more: object) -> JsonObject:
        environments = {
            env.resolved_name: {
                "id": env.id,
                "args": env.args,
                "group_size": self.group_size_of(env),
                "sampling": env.sampling.model_dump(exclude_none=True),
            }
            for env in self.environments
        }
        settings = {
            "model": self.model.name,
            "seed": self.seed,
            "sampling": self.sampling.model_dump(exclude_none=True),
            "max_turns": self.max_turns,
            "env": environments,
            **more,
        }
        return dict(json.loads(json.dumps(settings, default=str)))

    @property
    def engine_urls(self) -> tuple[str, ...]:
        if self.inference is not None:
            return ()
        return tuple(url.rstrip("/").removesuffix("/v1") for url in self.client.base_url)

    def engine_config(self, free_port: Callable[[str], int]) -> InferenceConfig | None:
        """The engine to start, if any, completed from these keys. `free_port` gives a port of a host."""
        given = self.inference
        if given is None:
            return None
        values = given.model_dump() | {"output_dir": self.output_dir}
        if "model" not in given.model_fields_set:
            values["model"] = self.model.model_dump()
        if not given.server.port or "server" not in given.model_fields_set:
            values["server"]["port"] = free_port(given.server.host)
        if self.seq_len is not None and "max_model_len" not in given.model_fields_set:
            values["max_model_len"] = self.seq_len
        return InferenceConfig.model_validate(values)

    def rollout_config(
        self, urls: list[str], api: Literal["generate", "chat_completions"], *, seq_len: int, port: int
    ) -> RolloutConfig:
        """The rollout service at `port` of this machine that plays against the servers at `urls`."""
        client = {**self.client.model_dump(), "base_url": urls, "api": api}
        return RolloutConfig(
            env=[
                EnvConfig.model_validate({**env.model_dump(exclude={"num_examples", "group_size"}), "part": "eval"})
                for env in self.environments
            ],
            client=ClientConfig.model_validate(client),
            seq_len=seq_len,
            drain_deadline_s=0.0,
            server=ServerConfig(port=port),
            output_dir=self.output_dir,
            **{name: getattr(self, name) for name in PlayConfig.model_fields},
        )

    @model_validator(mode="after")
    def _environments(self) -> Self:
        if not self.environments:
            raise ValueError(
                "needs at least one environment, got none; name them with environment_ids"
                " (--environment-ids a,b), or add [[env]] with id = '<taskset>'"
            )
        remedy = "name each once, or give each [[env]] its own name"
        refuse_repeated_names(self.environments, "env and environment_ids", remedy)
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.inference is None:
            return self
        usual = type(self.client)()  # a resolved file names every key
        given = [key for key in ("api", "base_url") if getattr(self.client, key) != getattr(usual, key)]
        if given:
            raise ValueError(
                f"client.{min(given)} names servers that run already, but [inference] starts one; leave one out"
            )
        if self.inference.api_key is not None:
            raise ValueError(
                f"inference.api_key is not taken here; put the key into the variable {self.client.api_key_var}"
            )
        return self
