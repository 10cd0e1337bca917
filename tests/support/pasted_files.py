"""Files and commands as they stand in other launchers' documentation: taken, or refused in sentences of ours.

`python tests/support/pasted_files.py` prints a table of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.core.config import BaseConfig, load_config
from meshrl.eval.config import EvaluationConfig
from meshrl.inference.submission import InferenceProgramConfig
from meshrl.launch.config import RLConfig
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.prime_rl import PrimeRLKeys
from meshrl.rollout.config import RolloutConfig
from meshrl.sft.config import SFTConfig
from meshrl.synthesize.config import SynthesisConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.weights.config import WeightsConfig

FOLDER = Path(__file__).parents[1] / "unit" / "prime_rl" / "pasted"
PROGRAMS: dict[str, type[BaseConfig]] = {
    "rl": RLConfig, "orchestrator": OrchestratorConfig, "trainer": TrainerConfig, "inference": InferenceProgramConfig,
    "sft": SFTConfig, "eval": EvaluationConfig, "synthesize": SynthesisConfig, "rollout": RolloutConfig,
    "weights": WeightsConfig,
}  # fmt: skip
UNKNOWN = ("no such key", "unknown option", "unexpected argument", "Input should", "validation error")


@dataclass(frozen=True, kw_only=True)
class Pasted:
    """What became of one command."""

    command: str
    notes: tuple[str, ...] = ()
    refusal: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """accepted; explained, when each line of the refusal says what to do; else unknown."""
        if not self.refusal:
            return "accepted"
        return "unknown" if any(word in line for line in self.refusal for word in UNKNOWN) else "explained"


def load_program(program: str, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Any:
    """A program's configuration as its main loads it."""
    cls, section = PROGRAMS[program], "" if program in ("rl", "eval", "synthesize") else program
    return load_config(cls, argv, prog=program, environ=environ or {}, spellings=PrimeRLKeys(cls, section))


def paste(command: str, folder: Path = FOLDER) -> Pasted:
    """Has a program read its command line in `folder`, where its files are."""
    program, *argv = shlex.split(command)
    said, shown = io.StringIO(), io.StringIO()
    notes: Sequence[str] = ()
    refusal: list[str] = []
    with contextlib.chdir(folder), contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        try:
            notes = load_program(program, argv).notes
        except SystemExit as leaving:
            if leaving.code:
                lines = said.getvalue().splitlines()[:-1]
                refusal = [line.removeprefix(f"{program}: ").strip() for line in lines]
                refusal = [line for line in refusal if not line.startswith("the configuration has ")]
    return Pasted(command=command, notes=tuple(notes), refusal=tuple(refusal))


def commands() -> list[str]:
    """The commands, and one for each file that is a whole run."""
    files = [f"rl @ {path.name}" for path in sorted(FOLDER.glob("rl_*.toml"))]
    return list(dict.fromkeys([*files, *(FOLDER / "commands.txt").read_text().splitlines()]))


def main() -> None:
    pasted = [paste(command) for command in commands()]
    for each in pasted:
        sys.stdout.write(f"{each.verdict:10} {len(each.notes):3} notes  {each.command}\n")
        sys.stdout.writelines(f"{'':22}{line}\n" for line in each.refusal)
    counts = {
        verdict: sum(each.verdict == verdict for each in pasted) for verdict in ("accepted", "explained", "unknown")
    }
    sys.stdout.write(
        f"{len(pasted)} in all: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + os.linesep
    )


if __name__ == "__main__":
    main()
