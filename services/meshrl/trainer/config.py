"""Configuration of the `trainer` program."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config.shared import ServerConfig, TlsConfig, WeightBroadcastConfig
from meshrl.core.config.typed import changed
from meshrl.trainer.loss_config import LossConfig
from meshrl.trainer.runs.hooks import RunHooksConfig
from meshrl.trainer.runs.settings import RunSettings
from meshrl.training.config import TrainingConfig


class TrainerConfig(TrainingConfig):
    """The trainer: turns batches into weight versions."""

    server: ServerConfig = ServerConfig(port=50052)
    """Where TrainerService listens."""

    loss: LossConfig = LossConfig()
    """The policy loss."""

    weight_broadcast: WeightBroadcastConfig = WeightBroadcastConfig()
    """How new versions leave the trainer."""

    run_id: str = Field(default="main", min_length=1)
    """Name of the trainer's own run."""

    seq_len: int = Field(default=2048, ge=2)
    """Most tokens in one micro-batch."""

    max_concurrent_runs: int = Field(default=1, ge=1)
    """Most runs that train at once. 1: the trainer's own. More, with model.lora: so many beside its own, each with its
    adapter. CreateRun or `run_*` folders (`discover_runs`) add them."""

    join_rows: Literal["auto", "never", "always"] = "auto"
    """Pass short rows of several runs through the model together. auto: on a GPU, rows shorter than a quarter of
    seq_len. always: rows shorter than seq_len. never: a run's results are to the bit those of the run alone. Mixtures
    of experts, adapters with dropout, cp and tp never join."""

    discover_runs: bool = True
    """With max_concurrent_runs above 1: take up the runs of output_dir/run_*/control/orch.toml, and forget those whose
    folders are gone."""

    run_hooks: RunHooksConfig = RunHooksConfig()
    """Functions that are called as runs come and go."""

    max_adapters_gib: float | None = Field(default=None, gt=0.0)
    """GiB on each GPU for the adapters of added runs, with gradients and optimizers. None: half of what the loaded
    model leaves free."""

    max_failed_steps: int = Field(default=3, ge=1)
    """Failed steps in a row after which an added run is suspended."""

    max_queued_batches: int = Field(default=2, ge=1)
    """Batches that may wait while one trains; one more is refused."""

    history_events: int = Field(default=1_000, ge=16)
    """Step events kept for watchers that reconnect: three a step, one of them with the metrics, about 10 kB."""

    share_prefixes: bool | Literal["auto"] = "auto"
    """Compute the prompt that samples of a group share once, with the same loss and gradients. auto: on a CPU, if the
    prompt is long enough to pay. Models with sliding windows, capped scores or attention of their own cannot share."""

    enable_router_replay: bool = False
    """Mixtures of experts: send each token through the experts that the engine chose for it (router replay, R3), so
    that engines and trainer differ less. Each token takes layers x experts bytes more: 384 for Qwen3-30B-A3B. Refused
    over slow links (orchestrator.exchange, weight_broadcast.relays or max_mbps), unless router_replay_over_wan is
    set."""

    router_replay_over_wan: bool = False
    """Allow enable_router_replay over slow links."""

    release_memory: bool = False
    """Release torch's cached GPU memory after each step, before the version is published, for an engine on the same GPU
    that wakes. rl sets it with inference.sleep_while_training."""

    hub_deadline_s: float = Field(default=240.0, ge=0.0)
    """At start, how long to look for the weight hub and, with `weight_broadcast.type` auto, for a first engine. Less
    than the orchestrator's `deadlines.startup_s`."""

    publish_deadline_s: float = Field(default=600.0, gt=0.0)
    """Seconds for which the publication of a version may write, hash and send no byte before the trainer ends."""

    drain_deadline_s: float = Field(default=120.0, ge=0.0)
    """On SIGTERM or Drain, how long queued batches may take."""

    tls: TlsConfig = TlsConfig()
    """Certificates and tokens by which this program and its peers know each other."""

    @property
    def own_run(self) -> RunSettings:
        """The settings of the own run, the defaults of other runs."""
        return RunSettings(
            lora=self.model.lora,
            optim=self.optim,
            scheduler=self.scheduler,
            loss=self.loss,
            ckpt=self.ckpt,
            seed=self.seed,
            adapter_seed=self.seed,
            max_queued_batches=self.max_queued_batches,
            max_steps=self.max_steps,
        )

    @model_validator(mode="after")
    def _keys_of_added_runs(self) -> Self:
        of_added = changed(self, ("run_hooks", "max_adapters_gib", "max_failed_steps"))
        of_added += ["join_rows"] if self.join_rows == "always" else []
        if of_added and self.max_concurrent_runs == 1:
            raise ValueError(
                f"trainer.{of_added[0]} is about runs beside the trainer's own, and trainer.max_concurrent_runs is 1;"
                " raise that, or leave it out"
            )
        if self.join_rows == "always" and (self.model.cp > 1 or self.model.tp > 1):
            raise ValueError("trainer.join_rows is always, but with model.cp or model.tp rows never join; leave it out")
        if self.router_replay_over_wan and not self.enable_router_replay:
            raise ValueError(
                "trainer.router_replay_over_wan allows trainer.enable_router_replay over slow links; set that as well,"
                " or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _adapters(self) -> Self:
        if self.max_concurrent_runs > 1 and self.model.lora is None:
            raise ValueError(
                "trainer.max_concurrent_runs above 1 needs trainer.model.lora: only adapters of one model train side by"
                " side; set it, or leave max_concurrent_runs out"
            )
        if self.model.lora is not None and self.model.lora.modules_to_save:
            if self.max_concurrent_runs > 1:
                raise ValueError(
                    "trainer.model.lora.modules_to_save trains modules of the one model that several runs share; leave"
                    " it out, or max_concurrent_runs"
                )
            if self.weight_broadcast.lora_adapter_only:
                raise ValueError(
                    "trainer.model.lora.modules_to_save trains whole modules, which engines take in merged versions"
                    " alone; set trainer.weight_broadcast.lora_adapter_only to false"
                )
        return self
