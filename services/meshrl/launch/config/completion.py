"""Completes the merged layers of `rl` before validation: ports, environments to host, a preset's lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.core.config.schema import ReadTable, Table
from meshrl.core.config.shared import ALL_EXPERTS, EXPERT_RANK_STEP, ModelConfig
from meshrl.launch.config.presets import at, fit_preset, section_of
from meshrl.orchestrator.config import OrchestratorConfig

HOSTED_KEYS = (
    "id", "name", "args", "sampling", "seq_len", "workers", "isolated", "max_memory_mib", "deadlines", "part",
)  # fmt: skip
"""Of an orchestrator's environment; the rollout program takes them over."""


def complete(values: ReadTable) -> Table:
    """A hub without an engine of its own keeps its usual port, which a running engine can know; other servers get port
    0, for rl to choose."""
    completed = dict(values)
    fit_preset(completed)
    starts_engine = completed.get("inference") is not None
    ports = ["trainer", "rollout", *(["weights", "inference"] if starts_engine else [])]
    for name in ports:
        server = section_of(completed.setdefault(name, {}), "server")
        if server is not None:
            server.setdefault("port", 0)
    client = section_of(completed["rollout"], "client")
    if starts_engine and client is not None:
        client.setdefault("base_url", [])  # those that are started are known to the hub
    gpus, deployment = completed.get("trainer_gpu_ids"), section_of(completed["trainer"], "deployment")
    if isinstance(gpus, list) and gpus and deployment is not None:
        deployment.setdefault("num_train_gpus", len(gpus))  # one process for each GPU
    _adapt_experts(completed)
    _follow(completed, "rollout", "seq_len", "orchestrator")
    given = completed.get("runs")
    runs = given if isinstance(given, list) else []
    seq_len = str(at(completed, "trainer", "seq_len"))  # text where a flag gave it
    if seq_len.isdecimal() and int(seq_len) > OrchestratorConfig.model_fields["seq_len"].default:
        _follow(completed, "orchestrator", "seq_len", "trainer")
        for run in runs:
            if isinstance(run, dict):
                run.setdefault("seq_len", completed["trainer"]["seq_len"])
    for name in ["rollout", *(["inference"] if starts_engine else [])]:
        _follow(completed, name, "model", "trainer")
    rollout = completed.setdefault("rollout", {})
    if isinstance(rollout, dict) and "env" not in rollout:
        rollout["env"] = _hosted_environments([completed.get("orchestrator"), *runs])
    trainer = completed["trainer"]
    if runs and isinstance(trainer, dict):
        trainer.setdefault("max_concurrent_runs", max(2, len(runs)))
    return completed


def _adapt_experts(values: Table) -> None:
    """Where engines serve adapted experts and grouped products take the rank."""
    lora, rank = at(values, "trainer", "model", "lora"), str(at(values, "trainer", "model", "lora", "rank") or 16)
    merged = str(at(values, "trainer", "weight_broadcast", "lora_adapter_only")).lower() == "false"
    served = merged or at(values, "inference", "engine") == "embedded"
    if isinstance(lora, dict) and served and rank.isdecimal() and int(rank) % EXPERT_RANK_STEP == 0:
        lora.setdefault("target_parameters", [ALL_EXPERTS])


def _follow(values: Table, name: str, key: str, other: str) -> None:
    section, source = values.setdefault(name, {}), values.get(other)
    if isinstance(section, dict) and isinstance(source, Mapping) and source.get(key) is not None:
        value = source[key]
        if key == "model" and isinstance(value, Mapping):  # a trainer's model has keys that only trainers know
            value = {part: value[part] for part in value if part in ModelConfig.model_fields}
        section.setdefault(key, value)


def _hosted_environments(orchestrators: Sequence[object]) -> list[Table]:
    hosted: dict[str, Table] = {}
    trained = False
    for orchestrator in orchestrators:
        for part in ("train", "eval"):
            section = orchestrator.get(part) if isinstance(orchestrator, Mapping) else None
            entries = section.get("env") if isinstance(section, Mapping) else None
            trained |= part == "train" and entries is not None
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, Mapping) and isinstance(entry.get("id"), str):  # else its own key is reported
                    name = entry.get("name") or entry["id"]
                    hosted.setdefault(name, {"part": part, **{key: entry[key] for key in HOSTED_KEYS if key in entry}})
    return list(hosted.values()) if trained else []
