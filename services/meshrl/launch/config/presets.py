"""What the `algorithm` key of `rl` sets in orchestrator and trainer.

    name      advantage                    loss                             divided by
    default   default: minus group mean    default: DPPO mask, KL term      tokens of the batch
    grpo      grpo: over the group's std   grpo: clip 0.2, 0.2              each sequence, then their number
    dr_grpo   default                      grpo: clip 0.2, 0.2              the most tokens of a reply, sequences
    dapo      grpo                         grpo: clip 0.2, 0.28             tokens of the batch
    gspo      grpo                         gspo: clip 3e-4, 4e-4            each sequence, then their number
    opo       opo: length-weighted mean    default, without its KL term     tokens of the batch
    rloo      rloo: minus mean of others   default, without its KL term     tokens of the batch
    cispo     grpo                         cispo: ratios up to 5            tokens of the batch
    aipo      default                      aipo: ratios up to 4             tokens of the batch

Papers: grpo arXiv 2402.03300 (without its KL to a reference policy), dr_grpo 2503.20783, dapo 2503.14476 (its overlong
penalty is orchestrator.advantage.length_penalty, its dynamic sampling orchestrator.filters.zero_signal, which is on),
gspo 2507.18071, opo 2505.23585, rloo 2402.14740, cispo 2506.13585 (upper bound of ScaleRL, 2510.13786), aipo
2505.24034. opo and rloo are defined for tokens of the policy itself; ratio and mask of the default loss correct for
older ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshrl.core.config.layers import Given, Layer
from meshrl.core.config.schema import ReadTable, Table
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.trainer.loss_config import CONSTANTS, LossName, NormaliserName

AlgorithmName = Literal["default", "grpo", "dr_grpo", "dapo", "gspo", "opo", "rloo", "cispo", "aipo"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """`constants` differ from the loss's own values."""

    advantage: Literal["default", "grpo", "rloo", "opo"]
    loss: LossName
    normaliser: NormaliserName
    constants: Mapping[str, float] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "default": Preset(advantage="default", loss="default", normaliser="token"),
    "grpo": Preset(advantage="grpo", loss="grpo", normaliser="sequence"),
    "dr_grpo": Preset(advantage="default", loss="grpo", normaliser="fixed"),
    "dapo": Preset(advantage="grpo", loss="grpo", normaliser="token", constants={"clip_high": 0.28}),
    "gspo": Preset(advantage="grpo", loss="gspo", normaliser="sequence"),
    "opo": Preset(advantage="opo", loss="default", normaliser="token", constants={"kl_tau": 0.0}),
    "rloo": Preset(advantage="rloo", loss="default", normaliser="token", constants={"kl_tau": 0.0}),
    "cispo": Preset(advantage="grpo", loss="cispo", normaliser="token"),
    "aipo": Preset(advantage="default", loss="aipo", normaliser="token"),
}


def apply_preset(layer: Layer) -> None:
    """Puts the `algorithm` of one layer of configuration where it belongs; a component's own key wins.

    Keys of the same loss in lower layers are unset, so that an algorithm on the command line replaces the whole loss of
    a file. A loss whose type the same layer chooses is left alone.
    """
    name, origin = layer.given.get(("algorithm",), (None, ""))
    preset = _preset(name)
    if preset is None:
        return
    loss, advantage = ("trainer", "loss"), ("orchestrator", "advantage")
    if layer.given.get((*loss, "type"), (preset.loss,))[0] == preset.loss:
        unset = dict.fromkeys(
            ("fixed_length", "import_path", *(name for names in CONSTANTS.values() for name in names))
        )
        keys = {**unset, "type": preset.loss, "normaliser": preset.normaliser, **preset.constants}
        layer.offer(loss, {(key,): Given(value, origin) for key, value in keys.items()})
    if (*advantage, "type") not in layer.given:
        keys = {"import_path": None, "type": preset.advantage}
        layer.offer(advantage, {(key,): Given(value, origin) for key, value in keys.items()})


def fit_preset(values: Table) -> None:
    """Fits the preset to the layers above: its keys go if those chose another loss, and a loss divided by a fixed
    length gets the longest reply's."""
    preset = _preset(values.get("algorithm"))
    loss = None if preset is None else section_of(section_of(values, "trainer"), "loss")
    if preset is None or loss is None:
        return
    if loss.get("type", preset.loss) != preset.loss:
        for name, value in {"normaliser": preset.normaliser, **preset.constants}.items():
            if loss.get(name) == value:
                del loss[name]
    elif loss.get("normaliser") == "fixed" and loss.get("fixed_length") is None:
        loss["fixed_length"] = _longest_reply(values)


def _preset(name: object) -> Preset | None:
    return PRESETS.get(name) if isinstance(name, str) else None


def _longest_reply(values: ReadTable) -> object:
    for path in (("orchestrator", "sampling", "max_tokens"), ("rollout", "seq_len"), ("orchestrator", "seq_len")):
        if (found := at(values, *path)) is not None:
            return found
    return OrchestratorConfig.model_fields["seq_len"].default


def at(values: object, *names: str) -> object:
    for name in names:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def section_of(values: object, name: str) -> Table | None:
    section = values.setdefault(name, {}) if isinstance(values, dict) else None
    return section if isinstance(section, dict) else None
