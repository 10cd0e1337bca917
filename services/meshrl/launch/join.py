"""`rl @ rl.toml --mesh FOLDER --run-id NAME`: of a configuration of `rl`, the orchestrator's section, and the trainer's
adapter, optimizer, schedule and loss, for one more run in a mesh that runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meshrl.core.config import ConfigError
from meshrl.core.config.sources import TomlFile
from meshrl.launch.compose import NOT_THE_ORCHESTRATORS, own_keys
from meshrl.launch.config import RLConfig
from meshrl.launch.config.shared_keys import COMPONENTS
from meshrl.orchestrator.config import NewRunConfig, OrchestratorConfig
from meshrl.trainer.loss_config import NORMALISERS, LossConfig
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.model_config import LoraConfig

_LORA = {"rank", "alpha", "dropout", "target_modules"}


def has_sections(argv: Sequence[str]) -> bool:
    """Whether a command line has a section of `rl` rather than the orchestrator's own keys. Raises ConfigError for a
    file that cannot be read."""
    files = [TomlFile((), name)() for before, name in pairwise(argv) if before == "@"]
    flags = {word.removeprefix("--").partition(".")[0] for word in argv if word.startswith("--") and "." in word}
    return any(set(COMPONENTS) & set(keys) for keys in (*files, flags))


def joined(config: RLConfig) -> OrchestratorConfig:
    """Raises ConfigError for a run that cannot be one of a mesh."""
    if not config.orchestrator.run_id:
        raise ConfigError("--mesh adds a run, but run_id is empty; name the run with --run-id")
    given = own_keys(OrchestratorConfig, config.orchestrator, NOT_THE_ORCHESTRATORS)
    values = given.model_dump(exclude={"services"})
    origin = config.origin_of(("output_dir",)) or ""
    if not origin.startswith("--"):  # that of a file is for the run alone
        del values["output_dir"]
    own, trainer = config.orchestrator.run, config.trainer
    of_trainer = as_run(trainer.model.lora, trainer.optim, trainer.scheduler, trainer.loss)
    values["run"] = of_trainer.model_dump() | ({} if own is None else own.model_dump(exclude_unset=True))
    return OrchestratorConfig.model_validate(values | {"mesh": config.mesh})


def as_run(lora: LoraConfig | None, optim: OptimConfig, scheduler: SchedulerConfig, loss: LossConfig) -> NewRunConfig:
    """The rest is as in the mesh. Raises ConfigError for a loss that the contract cannot name."""
    if loss.type == "custom" or loss.normaliser not in (None, NORMALISERS[loss.type]):
        key = "type" if loss.type == "custom" else "normaliser"
        raise ConfigError(
            f"trainer.loss.{key} is {getattr(loss, key)!r}, which a run cannot bring to a mesh; leave it"
            " out, or set it in the mesh's own trainer.loss"
        )
    given = optim.model_dump(include=optim.model_fields_set)
    constants = {name: value for name, value in loss.constants.items() if value is not None}
    return NewRunConfig.model_validate(
        {
            "lora": None if lora is None else lora.model_dump(include=_LORA),
            "lr": given.pop("lr", None),
            "optim_type": given.pop("type", "adamw"),
            "optim": given | ({"max_norm": optim.max_norm or 0.0} if "max_norm" in given else {}),
            "scheduler": scheduler.model_dump() if scheduler.model_fields_set else None,
            "loss": {"name": loss.type, "constants": constants} if loss.model_fields_set else None,
        }
    )
