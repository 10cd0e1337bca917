"""Configuration of the `synthesize` program; read by its main."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from meshrl.trials.config import TrialsConfig


class SynthesisConfig(TrialsConfig):
    """Has a model play environments, and writes the conversations as a dataset that `sft` trains on.

    The model is behind client.base_url, an engine of `inference` or any server of /v1/chat/completions, or at an engine
    that this command starts (--inference). The same command plays only missing rollouts; with more tasks, or another
    output_dir and the same dataset, it appends.
    """

    everyday_keys: ClassVar[Mapping[str, Sequence[str]]] = {
        "Who speaks": (
            "model.name", "client.base_url", "client.api_key_var", "client.api", "inference",
        ),
        "In which environments": ("environment_ids", "env.N.id", "env.N.args", "num_examples", "group_size"),
        "How it is sampled": (
            "sampling.temperature", "sampling.max_tokens", "seq_len", "max_turns", "max_concurrent", "seed",
        ),
        "What is kept": ("min_reward", "keep_truncated", "reasoning_field"),
        "What it leaves": ("dataset", "output_dir", "clean_output_dir", "log.level"),
    }  # fmt: skip

    keeps_conversations: ClassVar[bool] = True

    min_reward: float | None = None
    """Least reward of a rollout that is kept; None keeps all."""

    keep_truncated: bool = False
    """Keep rollouts that were cut off at a length limit; a model would learn to break off."""

    reasoning_field: str | None = Field(default="reasoning_content", min_length=1)
    """Field of an assistant's message for its reasoning. `content` writes it before the text, between <think> and
    </think>. None: leave it out."""

    dataset: Path | None = None
    """JSON-lines file to append the conversations to, with a parquet file of the same rows beside it. None:
    dataset.jsonl in output_dir."""

    output_dir: Path = Path("outputs/synthesize")
    """Folder for the dataset, every rollout and logs. One with results of the same settings is continued."""

    @property
    def dataset_path(self) -> Path:
        return self.output_dir / "dataset.jsonl" if self.dataset is None else self.dataset
