"""The `loss` section of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshrl.core.config.typed import TypedConfig

LossName = Literal["default", "aipo", "grpo", "gspo", "cispo", "custom"]
NormaliserName = Literal["token", "sequence", "fixed"]

CONSTANTS: Mapping[LossName, Mapping[str, float | None]] = {
    "default": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "aipo": {"delta": 4.0},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": None, "clip_high": 4.0},
    "custom": {},
}
"""The keys of each loss with their values when unset."""

NORMALISERS: Mapping[LossName, NormaliserName] = {
    "default": "token",
    "aipo": "token",
    "grpo": "sequence",
    "gspo": "sequence",
    "cispo": "token",
    "custom": "token",
}
"""The normaliser of each loss's paper, taken when `normaliser` is unset."""


class LossConfig(TypedConfig):
    """The policy loss (formulas in meshrl.algorithms.losses); a key that belongs to another loss is an error."""

    section: ClassVar = "loss"

    of_types: ClassVar = {
        "import_path": ["custom"],
        "kwargs": ["custom"],
        **{
            name: [loss for loss, keys in CONSTANTS.items() if name in keys]
            for constants in CONSTANTS.values()
            for name in constants
        },
    }

    type: LossName = "default"
    """default: DPPO-masked importance-weighted policy gradient with a KL term. aipo: truncated, detached ratio. grpo:
    PPO's clipped ratio. gspo: one clipped ratio per sequence. cispo: clipped, detached ratio. custom: your function."""

    normaliser: NormaliserName | None = None
    """token: mean over the sampled tokens of the batch. sequence: mean over tokens, then over sequences. fixed: sum
    over tokens / fixed_length, mean over sequences. None: sequence for grpo and gspo, token for others."""

    fixed_length: int | None = Field(default=None, ge=1)
    """normaliser fixed: what every sequence is divided by, usually the most tokens that may be sampled."""

    dppo_mask_low: float | None = Field(default=None, gt=0.0)
    """default: mask a token of negative advantage when its probability fell by more than this. None: 0.2."""

    dppo_mask_high: float | None = Field(default=None, gt=0.0)
    """default: mask a token of positive advantage when its probability rose by more than this. None: 0.2."""

    adv_tau: float | None = Field(default=None, ge=0.0)
    """default: weight of the advantages. None: 1."""

    kl_tau: float | None = Field(default=None, ge=0.0)
    """default: weight of the squared log-ratio to the sampling policy. None: 1e-3."""

    delta: float | None = Field(default=None, gt=0.0)
    """aipo: importance ratios are cut off above this. None: 4."""

    clip_low: float | None = Field(default=None, gt=0.0, le=1.0)
    """grpo, gspo, cispo: ratios are clipped below 1 - clip_low. None: 0.2, 3e-4 and no lower bound."""

    clip_high: float | None = Field(default=None, gt=0.0)
    """grpo, gspo, cispo: ratios are clipped above 1 + clip_high. None: 0.2, 4e-4 and 4."""

    import_path: str | None = None
    """custom: `package.module.function`, called once a sequence with SequenceInputs; returns a SequenceLoss."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """custom: keyword arguments of the function."""

    ref_kl_tau: float = Field(default=1.0, ge=0.0)
    """Weight of the ref_kl term, where a batch has one."""

    ref_kl_delta: float = Field(default=4.0, gt=0.0)
    """Importance ratios of the ref_kl term are cut off above this."""

    @property
    def constants(self) -> Mapping[str, float | None]:
        """Those of the chosen loss by key."""
        own = {name: getattr(self, name) for name in CONSTANTS[self.type]}
        return {name: CONSTANTS[self.type][name] if value is None else value for name, value in own.items()}

    @property
    def resolved_normaliser(self) -> NormaliserName:
        return NORMALISERS[self.type] if self.normaliser is None else self.normaliser

    @model_validator(mode="after")
    def _keys_of_this_loss(self) -> Self:
        self.refuse_foreign()
        if (self.type == "custom") != (self.import_path is not None):
            raise ValueError("loss.type custom needs loss.import_path: the package.module.function that is the loss")
        return self

    @model_validator(mode="after")
    def _length_of_fixed(self) -> Self:
        if (self.resolved_normaliser == "fixed") != (self.fixed_length is not None):
            raise ValueError(
                f"loss.fixed_length goes with loss.normaliser fixed and with no other, got {self.fixed_length} with"
                f" {self.resolved_normaliser}; set both or neither"
            )
        return self
