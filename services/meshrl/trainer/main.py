"""The `trainer` program: one rank of a training group, or the agent that starts its ranks."""

from __future__ import annotations

from meshrl.core.config import load_config
from meshrl.prime_rl import PrimeRLKeys
from meshrl.trainer.config import TrainerConfig
from meshrl.training.bench.config import BenchConfig
from meshrl.training.parallel.rank_main import rank_main


def main() -> None:
    rank_main(
        "trainer",
        lambda: load_config(TrainerConfig, prog="trainer", spellings=PrimeRLKeys(TrainerConfig, "trainer")),
        run_bench=_run_bench,
    )


def _run_bench(config: TrainerConfig, bench: BenchConfig) -> None:
    from meshrl.trainer.objectives import build_objective  # the same
    from meshrl.training.bench.run import bench_program

    bench_program(config, bench, objective=lambda: build_objective(config.loss), seq_len=config.seq_len)


if __name__ == "__main__":
    main()
