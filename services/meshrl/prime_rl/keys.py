"""The keys of prime-rl's releases that are spelt otherwise here, or missed.

Paths are those of `rl`; `*` is any place in a list or any name. A program that runs alone reads the rows of its own
section. For a key without a row the loader suggests the nearest one: rows explain absences of keys that many files
have, or whose nearest key means another thing. docs/prime-rl-keys.md lists the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """Without `new` it has no successor; `why` has the reason and the remedy."""

    old: str
    new: str = ""
    why: str = ""
    unused: bool = False
    """Taken with a note that it has no effect; False refuses it."""

    only: tuple[str, ...] = ()
    """For these values alone, in lower case; empty is for all."""

    alone: bool = False
    """For a program that runs by itself, not for `rl`."""

    values: Mapping[str, object] = field(default_factory=dict)
    """Values here, by prime-rl's as text in lower case."""


def _moved(old: str, new: str) -> ForeignKey:
    return ForeignKey(old=old, new=new)


def _unused(old: str, why: str, *only: str) -> ForeignKey:
    return ForeignKey(old=old, why=why, unused=True, only=only)


def _absent(old: str, why: str) -> ForeignKey:
    return ForeignKey(old=old, why=why)


def _alone(old: str, why: str) -> ForeignKey:
    return ForeignKey(old=old, why=why, unused=True, alone=True)


def _resumed(section: str) -> tuple[ForeignKey, ...]:
    """Resuming has a section of its own; empty it stands for the newest checkpoint."""
    step = f"{section}ckpt.resume_step"
    return (
        _moved(f"{section}resume.step", step),
        _absent(f"{section}resume.dir", "a run resumes its own output_dir; copy the checkpoint there"),
        ForeignKey(old=f"{section}resume", new=step, values={"{}": -1}),
    )


VLLM_ARGUMENTS: Mapping[str, str] = {
    "model": "model.name",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "served_model_name": "served_model_name",
    "max_model_len": "max_model_len",
    "seed": "seed",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "headless": "headless",
}
"""vLLM's arguments that are keys of [inference], for both engines, and not of [inference.vllm]."""

_ENVIRONMENTS = tuple(f"orchestrator.{part}.env.*" for part in ("train", "eval"))
_ALGORITHMS = ("orchestrator", "orchestrator.train.env.*")
_SAMPLINGS = (
    "orchestrator.sampling", "orchestrator.eval.sampling", "rollout.sampling", "rollout.env.*.sampling",
    *(f"{environment}.sampling" for environment in _ENVIRONMENTS),
)  # fmt: skip
_TRAINERS = ("trainer", "sft")
_SKIPS = ("skip_progress", "skip_scheduler", "skip_dataloader", "skip_optimizer")
_OFF = ("1", "none", "auto")
_PACKED = "rows are packed to seq_len tokens; lower trainer.seq_len where memory is short"
_TEACHER = "rl starts no teacher: start `inference`, and name it in orchestrator.teacher.client.base_url"
_TEXT = "models take text alone; leave it out"
_MODEL_CODE = "every model runs as transformers defines it, with attention and output head of meshrl"
_DIFFICULTY = "tasks are drawn in their order; orchestrator.filters.zero_signal drops groups without signal"
_IMPORTANCE = "tokens are masked by how far their probability moved, loss.dppo_mask_low and loss.dppo_mask_high"
_PARSERS = "rollouts exchange token ids, which rollout.renderer turns into messages and tool calls"

_RUN = (
    _moved("monitors.wandb", "wandb"),
    _moved("monitors.prime", "orchestrator.prime_monitor"),
    _moved("async_level", "max_async_level"),
    _moved("clean", "clean_output_dir"),
    _moved("orchestrator.ckpt", "ckpt"),
    _unused("ckpt.wait_for_weights_timeout", "a resumed trainer publishes its weights anew"),
    *(_unused(f"ckpt.{each}", "a resumed run takes up all that was saved", "false") for each in _SKIPS),
    *(_absent(f"ckpt.{each}", "a resumed run takes up all that was saved; leave it out") for each in _SKIPS),
    _moved("ckpt.keep", "ckpt.keep_last"),
    *_resumed(""),
    _moved("orchestrator.weight_broadcast", "weight_broadcast"),
    _moved("orchestrator.monitors.wandb", "orchestrator.wandb"),
    _moved("sft.monitors.wandb", "sft.wandb"),
    _absent("sft.eval", "sft plays no rollouts; give its weights to `eval --weights-dir`, or held-out rows to [val]"),
    _moved("sft.data.loss_mask", "sft.loss_mask"),
    _moved("sft.clean", "sft.clean_output_dir"),
    _moved("trainer.max_async_level", "max_async_level"),
    _moved("trainer.async_level", "max_async_level"),
    _unused("deployment.num_infer_replicas", "the engines are one pool", "1"),
    _absent("deployment.num_infer_replicas", "engines are one pool; set num_engines, or deployment.num_infer_nodes"),
    _moved("sft.deployment.num_gpus", "sft.deployment.num_train_gpus"),
    _moved("sft.deployment.num_nodes", "sft.deployment.num_train_nodes"),
    *(_absent(f"{each}env_vars", "programs inherit the environment that they are started with; set the variables there")
      for each in ("", "trainer.", "orchestrator.", "inference.", "sft.")),
    _absent("model.vlm", _TEXT),
    _absent("teacher_gpu_ids", _TEACHER),
    _absent("teacher_inference", _TEACHER),
    _unused("wandb.shared", "all programs share one run"),
    _unused("weight_broadcast.port", "rl chooses the ports"),
    _moved("weight_broadcast.timeout", "weight_broadcast.transfer_deadline_s"),
    _moved("weight_broadcast.adapter_only", "weight_broadcast.lora_adapter_only"),
)  # fmt: skip

_ORCHESTRATOR = (
    _moved("orchestrator.train.sampling", "orchestrator.sampling"),
    _moved("orchestrator.train.group_size", "orchestrator.group_size"),
    _moved("orchestrator.train.batch_size", "orchestrator.batch_size"),
    _moved("orchestrator.train.source", "orchestrator.train.env"),
    _moved("orchestrator.eval.source", "orchestrator.eval.env"),
    _moved("orchestrator.env", "orchestrator.train.env"),
    _moved("orchestrator.environment", "orchestrator.train.env.0"),
    _moved("orchestrator.rollouts_per_example", "orchestrator.group_size"),
    _moved("orchestrator.eval.rollouts_per_example", "orchestrator.eval.group_size"),
    *(_moved(f"{each}.rollouts_per_example", f"{each}.group_size") for each in _ENVIRONMENTS),
    *(_moved(f"{each}.env.taskset.id", f"{each}.id") for each in _ENVIRONMENTS),
    *(_moved(f"{each}.env.taskset", f"{each}.args") for each in _ENVIRONMENTS),
    *(_unused(f"{each}.env.*.harness.id", "agents chat by the loop of rollout.harness", "null", "default")
      for each in _ENVIRONMENTS),
    *(_unused(f"{each}.env.*.{place}.type", "programs of agents run beside their rollout", "subprocess")
      for each in _ENVIRONMENTS for place in ("runtime", "harness.runtime")),
    *(_absent(f"{each}.env.id", "one id names both: id = 'ENVIRONMENT+TASKSET'") for each in _ENVIRONMENTS),
    *(_moved(f"{each}.env.*", f"{each}.args.*") for each in _ENVIRONMENTS),
    *(_moved(f"{each}.algo.teacher.name", f"{each}.algo.teacher.model.name") for each in _ALGORITHMS),
    *(_moved(f"{each}.algo.teacher.base_url", f"{each}.algo.teacher.client.base_url") for each in _ALGORITHMS),
    _moved("orchestrator.algo.sampling.source.name", "orchestrator.teacher.model.name"),
    _moved("orchestrator.algo.sampling.source.base_url", "orchestrator.teacher.client.base_url"),
    *(_absent(f"{each}.algo.length_penalty", "orchestrator.advantage.length_penalty makes long rollouts cost reward")
      for each in _ALGORITHMS),
    _absent("orchestrator.val", "name held-out tasks in an [[orchestrator.eval.env]]"),
    _moved("orchestrator.async_level", "orchestrator.max_async_level"),
    _moved("orchestrator.max_concurrent", "rollout.max_concurrent"),
    _moved("orchestrator.renderer", "rollout.renderer"),
    _moved("orchestrator.tokenizer.name", "rollout.tokenizer"),
    _moved("orchestrator.advantage_type", "orchestrator.advantage.type"),
    _moved("orchestrator.client.timeout", "orchestrator.client.call_deadline_s"),
    _moved("orchestrator.eval.eval_base_model", "orchestrator.eval.eval_base"),
    _moved("orchestrator.buffer.online_difficulty_filtering", "orchestrator.filters.zero_signal"),
    _moved("orchestrator.buffer.seed", "orchestrator.seed"),
    *(_moved(f"{each}.max_completion_tokens", f"{each}.max_tokens") for each in _SAMPLINGS),
    *(_unused(f"{each}.repetition_penalty", "there are no penalties, which 1 stands for", "1", "1.0")
      for each in _SAMPLINGS),
    *(_unused(f"{each}.min_tokens", "completions have no fewest number of tokens", "0") for each in _SAMPLINGS),
    *(_absent(f"{each}.min_tokens", "a completion may end at once; leave it out") for each in _SAMPLINGS),
    *(_absent(f"{each}.extra_body", "the keys of sampling are all that engines are asked") for each in _SAMPLINGS),
    _moved("orchestrator.teacher_model", "orchestrator.teacher"),
    _moved("orchestrator.teacher_rollout_model", "orchestrator.teacher"),
    _unused("orchestrator.use_sft_loss", "a run learns from rewards, unless training_mode is set", "false"),
    _unused("orchestrator.need_sft_loss", "a run learns from rewards, unless training_mode is set", "false"),
    _unused("orchestrator.oversampling_factor", "orchestrator.max_inflight_rollouts is how much is under way"),
    _unused("orchestrator.concurrency", "rollout.max_concurrent is how many rollouts run at once"),
    _unused("orchestrator.micro_batch_size", _PACKED),
    _unused("orchestrator.num_train_workers", "the trainer reports the number of its processes"),
    _unused("orchestrator.use_token_client", "rollouts always exchange token ids"),
    _moved("orchestrator.lora_name", "run_id"),
    _moved("orchestrator.model.lora.name", "run_id"),
    _moved("orchestrator.model.lora", "trainer.model.lora"),
    _unused("orchestrator.strict_async_level", "orchestrator.max_async_level always holds"),
    _unused("orchestrator.mask_truncated_completions", "they are trained as they are", "false"),
    _unused("orchestrator.zero_truncated_completions", "they are trained as they are", "false"),
    _absent("orchestrator.buffer", _DIFFICULTY),
    _absent("orchestrator.pre_batch_filters", _DIFFICULTY),
    _absent("orchestrator.post_batch_filters", _DIFFICULTY),
    _absent("orchestrator.rollout_transport", "batches go to the trainer over gRPC; leave it out"),
    _absent("orchestrator.heartbeat", "the orchestrator serves grpc.health.v1 at orchestrator.server"),
    _absent("orchestrator.eval.environment_ids", "name each in an [[orchestrator.eval.env]] of its own"),
    _unused("orchestrator.eval.skip_eval_on_resume", "a resumed run evaluates when its interval is over"),
    _unused("orchestrator.client.server_type", "engines report their kind"),
    _unused("orchestrator.client.skip_model_check", "engines are asked for the model by rollout.model.name"),
    _unused("orchestrator.client.admin_base_url", "engines take versions from the weight hub"),
)  # fmt: skip

_TRAINER = (
    _unused("trainer.wandb", "the orchestrator logs the trainer's metrics; set wandb there, or at the top of rl"),
    _unused("trainer.monitors", "the orchestrator logs the trainer's metrics; set wandb there, or at the top of rl"),
    _unused("trainer.micro_batch_size", _PACKED),
    _unused("trainer.data.micro_batch_size", _PACKED),
    _moved("trainer.data.seq_len", "trainer.seq_len"),
    _moved("trainer.data.fake.batch_size", "trainer.bench.rows"),
    ForeignKey(
        old="trainer.data.fake.generate_samples", new="trainer.bench.lengths",
        values={"true": "variable", "false": "fixed"},
    ),
    _moved("trainer.data.fake", "trainer.bench"),
    _moved("trainer.model.seq_len", "trainer.seq_len"),
    _moved("trainer.weight_broadcast.adapter_only", "trainer.weight_broadcast.lora_adapter_only"),
    _moved("trainer.weight_broadcast.timeout", "trainer.weight_broadcast.transfer_deadline_s"),
    _unused("trainer.weight_broadcast.port", "the trainer chooses its ports"),
    _unused("trainer.recompute_logprobs", "importance ratios are always of the trainer's own logprobs"),
    _absent("trainer.metrics_server", "the trainer's metrics are in metrics.jsonl of the run"),
    *(_absent(f"trainer.loss.{each}", _IMPORTANCE)
      for each in ("mask_ratio_low", "mask_ratio_high", "token_mask_low", "token_mask_high",
                   "geo_mask_low", "geo_mask_high", "sequence_mask_low", "sequence_mask_high", "sequence_clip_high",
                   "kl_mask_high")),
)  # fmt: skip

_MODELS = tuple(
    key
    for trainer in _TRAINERS
    for key in (
        _moved(f"{trainer}.model.experimental.lora", f"{trainer}.model.lora"),
        ForeignKey(
            old=f"{trainer}.model.attn",
            new=f"{trainer}.model.attn",
            values={f"flash_attention_{n}": "auto" for n in (2, 3, 4)} | {"fa4": "auto", "eager": "sdpa"},
        ),
        _unused(f"{trainer}.model.impl", _MODEL_CODE),
        _unused(f"{trainer}.model.liger_kernel", _MODEL_CODE),
        ForeignKey(old=f"{trainer}.model.tp", new=f"{trainer}.model.tp", values={"none": 1, "auto": 1}),
        ForeignKey(old=f"{trainer}.model.ep", new=f"{trainer}.model.ep", values={"none": 1}),
        ForeignKey(old=f"{trainer}.model.cp", new=f"{trainer}.model.cp", values={"none": 1, "auto": 1}),
        _unused(f"{trainer}.model.cp_style", "ranks that share rows always exchange heads, as Ulysses does", "ulysses"),
        _absent(f"{trainer}.model.cp_style", "ranks that share rows exchange heads; set ulysses, or leave it out"),
        _absent(f"{trainer}.model.vlm", _TEXT),
        _moved(f"{trainer}.model.debug.num_layers", f"{trainer}.bench.num_layers"),
        _moved(f"{trainer}.model.debug.random_init", f"{trainer}.bench.random_weights"),
        _moved(f"{trainer}.model.debug.force_balanced_routing", f"{trainer}.bench.balanced_routing"),
        ForeignKey(
            old=f"{trainer}.model.moe_router_dtype",
            new=f"{trainer}.model.router_dtype",
            values={"float32": "float32", "bfloat16": "model"},
        ),
        _unused(f"{trainer}.model.load_using_meta", "models are always loaded shard by shard"),
        _unused(f"{trainer}.model.moe_use_grouped_mm", "experts are computed as transformers does"),
        *(
            _unused(f"{trainer}.model.{each}", f"{trainer}.max_logits_mib bounds the logits that are kept")
            for each in ("fused_lm_head_token_chunk_size", "fused_lm_head_chunk_size")
        ),
        *(
            _unused(f"{trainer}.model.ac_offloading.{each}", "activations move as fast as the device lets them")
            for each in ("max_inflight_activations", "pin_memory")
        ),
        *(_unused(f"{trainer}.ckpt.{each}", "a resumed run takes up all that was saved", "false") for each in _SKIPS),
        *(
            _absent(f"{trainer}.ckpt.{each}", "a resumed run takes up all that was saved; leave it out")
            for each in _SKIPS
        ),
        _moved(f"{trainer}.ckpt.keep", f"{trainer}.ckpt.keep_last"),
        *_resumed(f"{trainer}."),
        _unused(f"{trainer}.gc", "Python decides when to collect garbage"),
        _unused(f"{trainer}.dist_timeout_seconds", "each wait has a deadline of its own"),
    )
)

_INFERENCE = (
    _unused("inference.parallel.tp", "1 is the default of inference.tensor_parallel_size", "1"),
    _unused("inference.parallel.dp", "1 is the default of inference.data_parallel_size", "1"),
    _moved("inference.parallel.tp", "inference.tensor_parallel_size"),
    _moved("inference.parallel.dp", "inference.data_parallel_size"),
    _moved("inference.parallel.dp_local", "inference.data_parallel_size_local"),
    _moved("inference.model.max_model_len", "inference.max_model_len"),
    *(_moved(f"inference.vllm.{argument}", f"inference.{key}") for argument, key in VLLM_ARGUMENTS.items()),
    _moved("inference.model.enforce_eager", "inference.enforce_eager"),
    _moved("inference.max_lora_rank", "inference.lora_rank"),
    *(
        ForeignKey(old=f"inference.{old}", new=f"inference.{new}", values={"true": "float32", "false": "model"})
        for old, new in (("enable_fp32_lm_head", "head_dtype"), ("enable_fp32_router_logits", "router_dtype"))
    ),
    _moved("inference.vllm_extra", "inference.vllm"),
    *(_moved(f"inference.{each}", f"inference.vllm.{each}")
      for each in ("enable_expert_parallel", "enable_prefix_caching", "all2all_backend", "quantization",
                   "kv_cache_dtype", "enable_eplb")),
    *(_unused(f"inference.model.{each}", _PARSERS)
      for each in ("tool_call_parser", "reasoning_parser", "enable_auto_tool_choice")),
    _unused("inference.api_server_count", "one server answers for an engine"),
)  # fmt: skip

_ALONE = (
    ForeignKey(old="orchestrator.ckpt.interval", new="orchestrator.checkpoint_interval", alone=True),
    ForeignKey(old="orchestrator.ckpt", new="orchestrator.checkpoint_at_end", alone=True, values={"{}": True}),
    _alone("orchestrator.ckpt", "the trainer writes and resumes checkpoints; start it with the same [ckpt]"),
    ForeignKey(old="orchestrator.lora_name", new="orchestrator.run_id", alone=True),
    ForeignKey(old="orchestrator.model.lora.name", new="orchestrator.run_id", alone=True),
    ForeignKey(old="orchestrator.model.lora", new="orchestrator.run.lora", alone=True),
    ForeignKey(old="orchestrator.optim.lr", new="orchestrator.run.lr", alone=True),
    ForeignKey(old="orchestrator.optim.type", new="orchestrator.run.optim_type", alone=True),
    ForeignKey(old="orchestrator.optim", new="orchestrator.run.optim", alone=True),
    ForeignKey(old="orchestrator.scheduler", new="orchestrator.run.scheduler", alone=True),
    ForeignKey(old="orchestrator.loss.type", new="orchestrator.run.loss.name", alone=True),
    ForeignKey(old="orchestrator.loss", new="orchestrator.run.loss.constants", alone=True),
    ForeignKey(old="orchestrator.share", new="orchestrator.run.share", alone=True),
    _alone("orchestrator.model", "the trainer names the model; give [model] to trainer, rollout, inference"),
    _alone("orchestrator.client", "the rollout program calls engines; start it with the same [client]"),
    _alone("orchestrator.log.vf_level", "environments run in the rollout program; start it with --vf-level"),
    _alone("orchestrator.weight_broadcast", "the hub brings versions to engines; see services.weights"),
    _alone("trainer.max_async_level", "the orchestrator keeps to it; start it with --max-async-level"),
    _alone("trainer.async_level", "the orchestrator keeps to it; start it with --max-async-level"),
    _alone("inference.wandb", "the orchestrator logs metrics; start it with [wandb]"),
)

KEYS: tuple[ForeignKey, ...] = (*_ALONE, *_RUN, *_ORCHESTRATOR, *_TRAINER, *_MODELS, *_INFERENCE)
"""The first that fits counts."""
