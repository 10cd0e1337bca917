"""The `synthesize` program: plays the missing trials and appends the conversations worth keeping to the dataset."""

from __future__ import annotations

import asyncio
import json
from functools import partial

from loguru import logger

from meshrl.core.config import load_config
from meshrl.core.durable import write_file
from meshrl.prime_rl import PrimeRLKeys
from meshrl.sampling.groups import RolloutGroup
from meshrl.synthesize.config import SynthesisConfig
from meshrl.synthesize.dataset import ConversationDataset
from meshrl.trials.plan import Trial
from meshrl.trials.play import TrialRun
from meshrl.trials.program import run_trials
from meshrl.trials.results import TrialResults

SERVED = "served"
"""Name of the served weights in the results."""
SUMMARY = "summary.json"


async def synthesize(dataset: ConversationDataset, run: TrialRun) -> int:
    """Makes one dataset, which it opens and closes. Returns the exit code: 0 even if rollouts failed; the summary lists
    them. Raises RunError."""

    def on_end(trial: Trial, group: RolloutGroup) -> None:
        dataset.take(run.results.record(SERVED, trial, group))

    with dataset:
        await asyncio.to_thread(dataset.take, run.results.stored)  # where an earlier process was cut off
        await run.play(SERVED, None, on_end)
        parquet = await asyncio.to_thread(dataset.write_parquet)
        await asyncio.to_thread(_report, run, dataset)
    logger.info("the dataset is {}{}", dataset.path, f" and {parquet}" if parquet else "")
    return 0


def _report(run: TrialRun, dataset: ConversationDataset) -> None:
    asked = sum(span.rollouts for span in run.spans)
    played = {(environment, task) for _, environment, task, _ in run.results.done}
    groups = sum(span.tasks for span in run.spans)
    failed_groups = sum((span.environment, task) not in played for span in run.spans for task in range(span.tasks))
    failed = run.left(SERVED)
    dropped = dict(sorted(dataset.dropped.items()))
    summary = {
        "asked": asked, "kept": dataset.kept, "dropped": dropped, "failed": failed,
        "groups": groups, "failed_groups": failed_groups,
    }  # fmt: skip
    write_file(run.results.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    reasons = ", ".join(f"{count} for {why}" for why, count in dropped.items()) or "none"
    logger.info(
        "{} rollouts kept of {} asked for; dropped: {}; {} failed; {} of {} groups failed whole and are dropped",
        dataset.kept, asked, reasons, failed, failed_groups, groups,
    )  # fmt: skip


def main() -> None:
    config = load_config(SynthesisConfig, prog="synthesize", spellings=PrimeRLKeys(SynthesisConfig))
    derived = (SUMMARY, "dataset.jsonl", "dataset.parquet") if config.dataset is None else (SUMMARY,)
    keeps = config.model_dump(include={"min_reward", "keep_truncated", "reasoning_field"})
    settings = config.result_settings(**keeps)
    results = TrialResults(config.output_dir, settings, clean=config.clean_output_dir, derived=derived)
    dataset = ConversationDataset(config.dataset_path, model=config.model.name, **keeps)
    run_trials("synthesize", config, results, partial(synthesize, dataset))


if __name__ == "__main__":
    main()
