"""Configuration of the `eval` program; read by its main."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from meshrl.core.config.shared import WandbConfig
from meshrl.core.slurm.config import OneNodeConfig, SlurmConfig
from meshrl.trials.config import TrialsConfig


class EvaluationConfig(TrialsConfig):
    """Evaluates a model, and the checkpoints of a run, in any number of environments at once.

    The model is behind client.base_url, an engine of `inference` or any server of /v1/chat/completions, or at an engine
    that this command starts (--inference). Every rollout is a line of results.jsonl; the same command plays only
    missing ones.
    """

    everyday_keys: ClassVar[Mapping[str, Sequence[str]]] = {
        "What is evaluated": ("model.name", "weights_dir", "steps", "eval_base"),
        "In which environments": (
            "environment_ids", "env.N.id", "env.N.args", "num_examples", "group_size", "pass_threshold",
        ),
        "How it is sampled": (
            "sampling.temperature", "sampling.max_tokens", "seq_len", "max_turns", "max_concurrent", "seed",
        ),
        "Where the model is": ("client.base_url", "client.api_key_var", "client.api", "inference"),
        "What it leaves": ("output_dir", "clean_output_dir", "wandb", "log.level"),
    }  # fmt: skip

    slurm: SlurmConfig | None = None
    """Submit the evaluation as a SLURM job. None: start it here."""

    deployment: OneNodeConfig = OneNodeConfig()
    """The node of the job."""

    weights_dir: Path | None = None
    """Folder of a run's checkpoints, OUTPUT_DIR/weights: they are loaded one after the other into the engines, which
    must see it under the same path. None: the served weights."""

    steps: Annotated[list[int], Field(min_length=1)] | None = None
    """Steps whose checkpoints are evaluated. None: all of weights_dir."""

    eval_base: bool = True
    """Also evaluate the model that the engines were started with, before the checkpoints."""

    pass_threshold: float = 1.0
    """Least reward of a rollout that passes, for pass@k."""

    bootstrap_samples: int = Field(default=1000, ge=100)
    """Resamplings of the tasks, for the intervals."""

    output_dir: Path = Path("outputs/eval")
    """Folder for results, table, curve and logs. One with results of the same settings is continued."""

    wandb: WandbConfig | None = None
    """Weights & Biases. None: off."""

    @model_validator(mode="after")
    def _what(self) -> Self:
        if self.weights_dir is None and self.steps is not None:
            raise ValueError("steps names checkpoints, so weights_dir must say where they are (--weights-dir FOLDER)")
        if self.weights_dir is None and not self.eval_base:
            raise ValueError("with eval_base off there is nothing to evaluate; give weights_dir, or leave it on")
        if self.weights_dir is not None and self.client.api == "chat_completions":
            raise ValueError(
                "weights_dir needs engines that load weights, but client.api is 'chat_completions'; leave one out"
            )
        return self
