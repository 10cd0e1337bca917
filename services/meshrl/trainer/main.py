"""The `trainer` program: one rank of a training group, or the agent that starts its ranks."""

from __future__ import annotations

from meshrl.core.config import load_config
from meshrl.prime_rl import PrimeRLKeys
from meshrl.trainer.config import TrainerConfig
from meshrl.training.parallel.rank_main import rank_main


def main() -> None:
    rank_main(
        "trainer",
        lambda: load_config(TrainerConfig, prog="trainer", spellings=PrimeRLKeys(TrainerConfig, "trainer")),
    )


if __name__ == "__main__":
    main()
