"""The `sft` program: one rank of a training group, or the agent that starts its ranks."""

from __future__ import annotations

from meshrl.core.config import load_config
from meshrl.sft.config import SFTConfig
from meshrl.sft.submission import submit_sft
from meshrl.training.bench.config import BenchConfig
from meshrl.training.parallel.rank_main import rank_main


def main() -> None:
    """Console script `sft`."""
    rank_main(
        "sft",
        lambda: load_config(SFTConfig, prog="sft", instead=submit_sft),
        run_rank=_run_rank,
        run_bench=_run_bench,
    )


def _run_rank(config: SFTConfig, rank: int) -> None:
    from meshrl.sft.program import run_rank  # takes seconds to import, and an agent needs none of it

    run_rank(config, rank)


def _run_bench(config: SFTConfig, bench: BenchConfig) -> None:
    from meshrl.algorithms.losses import cross_entropy_loss  # the same
    from meshrl.algorithms.objective import Objective
    from meshrl.training.bench.run import bench_program

    def objective() -> Objective:
        return Objective(loss=cross_entropy_loss, name="cross_entropy")

    bench_program(config, bench, objective=objective, seq_len=config.data.seq_len)


if __name__ == "__main__":
    main()
