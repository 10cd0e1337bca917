"""The `synthesize` program: reads its configuration, opens the results, and runs `Synthesis` with what plays."""

from __future__ import annotations

from meshrl.core.config import load_config
from meshrl.prime_rl import PrimeRLKeys
from meshrl.synthesize.config import SynthesisConfig
from meshrl.synthesize.dataset import ConversationDataset, RowFilter
from meshrl.synthesize.program import SUMMARY, Synthesis
from meshrl.trials.program import run_trials
from meshrl.trials.results import TrialResults


def main() -> None:
    """Console script `synthesize`."""
    config = load_config(SynthesisConfig, prog="synthesize", spellings=PrimeRLKeys(SynthesisConfig))
    derived = (SUMMARY, "dataset.jsonl", "dataset.parquet") if config.dataset is None else (SUMMARY,)
    settings = config.result_settings(
        min_reward=config.min_reward,
        keep_truncated=config.keep_truncated,
        reasoning_field=config.reasoning_field,
    )
    results = TrialResults(config.output_dir, settings, clean=config.clean_output_dir, derived=derived)
    dataset = ConversationDataset(
        config.dataset_path,
        model=config.model.name,
        keep=RowFilter(min_reward=config.min_reward, keep_truncated=config.keep_truncated),
        reasoning_field=config.reasoning_field,
    )
    run_trials("synthesize", config, results, Synthesis(dataset).run, conversations=True)


if __name__ == "__main__":
    main()
