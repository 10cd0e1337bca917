"""The `eval` program: its configuration, the weights to evaluate, and the run of both."""

from __future__ import annotations

import sys

from meshrl.core.config import ConfigError, load_config
from meshrl.core.slurm.submit import BatchJob, submit
from meshrl.core.telemetry.monitor import ConsoleSink, Monitor, Sink
from meshrl.core.telemetry.sinks import WandbSink
from meshrl.eval.checkpoints import weights_to_evaluate
from meshrl.eval.config import EvaluationConfig
from meshrl.eval.program import Evaluation
from meshrl.eval.report import CURVE, METRICS, SUMMARY, TABLE
from meshrl.prime_rl import PrimeRLKeys
from meshrl.trials.program import run_trials
from meshrl.trials.results import TrialResults


def main() -> None:
    config = load_config(EvaluationConfig, prog="eval", instead=submit_eval, spellings=PrimeRLKeys(EvaluationConfig))
    try:
        weights = weights_to_evaluate(config.weights_dir, config.steps, base=config.eval_base)
    except ConfigError as error:
        sys.stderr.write(f"eval: {error}\n")
        sys.exit(2)
    folder = None if config.weights_dir is None else str(config.weights_dir.resolve())
    results = TrialResults(
        config.output_dir,
        config.result_settings(weights_dir=folder),
        clean=config.clean_output_dir,
        derived=(SUMMARY, TABLE, CURVE, METRICS),
    )
    sinks: list[Sink] = [ConsoleSink()]
    if config.wandb is not None:
        sinks.append(WandbSink(config.wandb, config.output_dir, config.model_dump(mode="json")))
    evaluation = Evaluation(
        weights,
        Monitor(sinks),
        loads=config.weights_dir is not None,
        pass_threshold=config.pass_threshold,
        bootstrap_samples=config.bootstrap_samples,
    )
    run_trials("eval", config, results, evaluation.run)


def submit_eval(config: EvaluationConfig, dry_run: bool) -> str | None:
    """Writes the job and, unless it is a dry run, submits it. None without [slurm]. Raises ConfigError."""
    if config.slurm is None:
        return None
    job = BatchJob(
        program="eval",
        module="meshrl.eval.main",
        config=config.model_copy(update={"slurm": None}),
        output_dir=config.output_dir,
        gpus_per_node=config.deployment.gpus_per_node,
    )
    return submit(job, config.slurm, dry_run=dry_run)


if __name__ == "__main__":
    main()
