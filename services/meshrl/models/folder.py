"""Reads a published model: the files of a folder, or of a name on the Hugging Face hub, and the tensors in them.

`WeightReader` compares names and shapes before it reads a value, converts by transformers' own rules (such as experts
that are stored one by one), and gives one tensor at a time.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from loguru import logger
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from meshrl.core.config.shared import ModelConfig
from meshrl.core.huggingface import ADVICE, NO_ANSWER, give_up_on_silence, told
from meshrl.models.sharded import Part
from meshrl.models.state import stored_tensors

SAFE_FILES = ("model.safetensors", "model.safetensors.index.json")
TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
GENERATION_CONFIG = "generation_config.json"
ROWS_AT_ONCE = 16384  # of a matrix, while two are compared


class ModelError(Exception):
    """A model could not be loaded; the message names the remedy."""


@dataclass(frozen=True)
class ModelFolder:
    name: str
    path: Path

    @classmethod
    def find(cls, config: ModelConfig) -> ModelFolder:
        """The folder itself, or the downloaded files of that name on the hub. Raises ModelError."""
        path = Path(config.name)
        if not path.is_dir():
            give_up_on_silence()
            try:
                for kind in ("*.safetensors", "*.bin"):
                    path = Path(snapshot_download(config.name, allow_patterns=[kind, "*.json"], ignore_patterns="*/*"))
                    if any(path.glob(kind)):
                        break
            except (OSError, ValueError, NO_ANSWER) as error:
                raise ModelError(
                    f"cannot download the weights of model.name {config.name!r}: {told(error)}; {ADVICE}"
                ) from error
        return cls(config.name, path)

    def read_bytes(self, name: str) -> bytes | None:
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def weight_files(self) -> list[Path]:
        """Those that transformers would read. Raises ModelError for none."""
        for whole, index in (SAFE_FILES, TORCH_FILES):
            if (self.path / whole).is_file():
                return [self.path / whole]
            if (self.path / index).is_file():
                return self._indexed(self.path / index)
        others = sorted(
            path.name for pattern in ("*.safetensors", "*.bin", "*.gguf") for path in self.path.glob(pattern)
        )
        raise ModelError(
            f"model.name {self.name!r} holds no weights: {' or '.join((*SAFE_FILES, TORCH_FILES[0]))} is needed"
            + (f", and {others[0]} is not read" if others else "")
        )

    def _indexed(self, index: Path) -> list[Path]:
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"model.name {self.name!r}: {index.name} is no index of weights ({error!r})") from error
        if lost := [name for name in names if not (self.path / name).is_file()]:
            raise ModelError(
                f"model.name {self.name!r}: {index.name} lists {lost[0]}, which is not there "
                f"({len(lost)} of {len(names)} files); copy the folder again"
            )
        return [self.path / name for name in names]

    @cached_property
    def tensors(self) -> Mapping[str, Any]:
        """By name in the files, an object that gives the tensor's part by which it is indexed. Raises ModelError."""
        found: dict[str, Any] = {}
        for path in self.weight_files():
            try:
                if path.suffix == ".safetensors":
                    file: Any = safe_open(path, framework="pt")
                    found |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  # no mapping
                else:
                    found |= torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except (OSError, SafetensorError, RuntimeError, ValueError) as error:
                raise ModelError(f"model.name {self.name!r}: {path.name} cannot be read: {error}") from error
        return found


@dataclass(kw_only=True)
class _Conversion:
    target: str
    keys: list[tuple[str, str]] = field(default_factory=list)  # the pattern of the converter that took it, its name
    converter: WeightConverter | None = None  # None: one tensor under another name, or the same
    gives: Mapping[str, torch.Size] = field(default_factory=dict)


class WeightReader:
    """The weights of a folder for one model; made from names and shapes alone."""

    def __init__(self, folder: ModelFolder, model: PreTrainedModel) -> None:
        """`model` may be without storage or sharded; its adapters are left out.

        Raises ModelError for weights that are missing, of another shape, quantised or different where they are tied.
        """
        self._folder, self._model = folder, model
        self._own = stored_tensors(model)
        self._same = _tied_names(model)
        self._refuse_quantised()
        self._conversions, unused = self._match()
        self._check(unused)

    def read(self, part: Callable[[str], Part | None] = lambda name: ...) -> Iterator[tuple[str, torch.Tensor]]:
        """The asked part of each tensor by its name, on the CPU, maybe in the file's dtype; None asks for nothing.

        Of a tensor that needs no conversion only the part is read. Raises ModelError.
        """
        done: dict[str, str] = {}
        for conversion in self._conversions:
            wanted = {}
            for name in conversion.gives:
                owner = self._same.get(name, name)
                if done.setdefault(owner, name) == name and (asked := part(owner)) is not None:
                    wanted[name] = asked
            if wanted and conversion.converter is None:
                ((name, asked),) = wanted.items()
                yield self._same.get(name, name), self._folder.tensors[conversion.keys[0][1]][asked]
            elif wanted:
                made = self._convert(conversion)
                for name, asked in wanted.items():
                    yield self._same.get(name, name), made[name][asked]

    def _refuse_quantised(self) -> None:
        quantised = getattr(self._model.config.get_text_config(), "quantization_config", None) or getattr(
            self._model.config, "quantization_config", None
        )
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
            raise ModelError(
                f"model.name {self._folder.name!r} holds weights that are quantised ({method}), which are neither "
                "trained nor served by the embedded engine; write a folder without quantization_config, in bfloat16, "
                "with transformers (from_pretrained with dequantize=True in its quantisation's configuration, then "
                "save_pretrained) and take that"
            )

    def _match(self) -> tuple[list[_Conversion], list[str]]:
        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        expected = {name: self._own[self._same.get(name, name)] for name in (*self._own, *self._same)}
        prefix = self._model.base_model_prefix
        found: dict[str, _Conversion] = {}
        unused = []
        for key in sorted(self._folder.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = key, None
            if name not in expected:
                unused.append(key)
                continue
            conversion = found.setdefault(name, _Conversion(target=name))
            if pattern is None and conversion.keys:
                raise ModelError(
                    f"model.name {self._folder.name!r}: the files hold both {conversion.keys[0][1]} and {key}, and "
                    f"each would be {name} of the model; delete one of them"
                )
            conversion.keys.append((pattern or key, key))
            if pattern is not None:
                conversion.converter = by_pattern[pattern]
        for name, conversion in found.items():
            if conversion.converter is None:
                conversion.gives = {name: self._shape(conversion.keys[0][1])}
            else:
                made = self._convert(conversion, meta=True)
                conversion.gives = {made_name: tensor.shape for made_name, tensor in made.items()}
        # What was used tells `save_pretrained` the names to write, as it does after transformers' own loading.
        self._model._weight_conversions = [rule for rule in rules if rule.was_used()]
        return list(found.values()), unused

    def _shape(self, key: str) -> torch.Size:
        stored = self._folder.tensors[key]
        return torch.Size(stored.shape if isinstance(stored, torch.Tensor) else stored.get_shape())

    def _convert(self, conversion: _Conversion, *, meta: bool = False) -> dict[str, torch.Tensor]:
        """In the model's dtype; `meta`: shapes alone."""
        assert conversion.converter is not None
        converter = copy.deepcopy(conversion.converter)
        target = conversion.target
        dtype = self._own[self._same.get(target, target)].dtype
        for pattern, key in conversion.keys:
            if meta:
                tensor = torch.empty(self._shape(key), dtype=dtype, device="meta")
            else:
                tensor = self._folder.tensors[key][...].to(dtype)
            converter.add_tensor(target, key, pattern, tensor)
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise ModelError(
                f"model.name {self._folder.name!r}: {conversion.keys[0][1]} and {len(conversion.keys) - 1} more do not "
                f"make {target}: {error}"
            ) from error
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    def _check(self, unused: list[str]) -> None:
        name = self._folder.name
        there = {self._same.get(made, made) for conversion in self._conversions for made in conversion.gives}
        if missing := sorted(self._own.keys() - there):
            raise ModelError(
                f"model.name {name!r} has no weights for {', '.join(missing[:3])} ({len(missing)} of {len(self._own)}"
                f" tensors of {type(self._model).__name__})"
                + (f"; its files hold {', '.join(unused[:3])}, which that model does not have" if unused else "")
            )
        for conversion in self._conversions:
            for made, shape in conversion.gives.items():
                expected = self._own[self._same.get(made, made)].shape
                if shape != expected:
                    count, key = len(conversion.keys), conversion.keys[0][1]
                    joined = f" (made of {count} tensors, first {key}; are some missing?)" if count > 1 else ""
                    raise ModelError(
                        f"model.name {name!r}: {made} is of shape {tuple(shape)} in the files{joined} and of "
                        f"{tuple(expected)} by config.json; the two belong to different models"
                    )
        self._check_tied()
        ignored = [*(self._model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        strange = [key for key in unused if not any(re.search(pattern, key) for pattern in ignored)]
        if strange:
            logger.warning(
                "{}: {} tensors of the files are not used, first {}: {} has none of that name",
                name, len(strange), strange[0], type(self._model).__name__,
            )  # fmt: skip

    def _check_tied(self) -> None:
        """Transformers would train two that differ, and engines serve one."""
        by_name = {conversion.target: conversion for conversion in self._conversions if conversion.converter is None}
        for alias, owner in self._same.items():
            if alias not in by_name or owner not in by_name:
                continue
            first, second = (self._folder.tensors[by_name[name].keys[0][1]] for name in (owner, alias))
            pieces = (slice(row, row + ROWS_AT_ONCE) for row in range(0, by_name[owner].gives[owner][0], ROWS_AT_ONCE))
            if not all(torch.equal(first[piece].float(), second[piece].float()) for piece in pieces):
                raise ModelError(
                    f"model.name {self._folder.name!r}: config.json ties {alias} to {owner} (tie_word_embeddings), but "
                    "the files hold the two with different values; set tie_word_embeddings to false to use both, or "
                    f"delete {alias} from the files"
                )


def renamed_in_layers(model: PreTrainedModel) -> bool:
    """Whether files name a part of a layer otherwise than the model, such as block_sparse_moe for mlp."""
    rules = [rule.reverse_transform() for rule in reversed(get_model_conversion_mapping(model, add_legacy=False))]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    for name in stored_tensors(model):
        in_files, _ = rename_source_key(name, renamings, [], reverse=True)
        parts = [re.findall(r"\.\d+\.(\w+)", each)[:1] for each in (name, in_files)]  # such as mlp of layers.0.mlp.gate
        if parts[0] != parts[1]:
            return True
    return False


def as_in_files(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model under the names of files: experts one by one, as parts that share memory."""
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return reverted


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Each further name of a parameter, to its first, under which it is published."""
    first: dict[int, str] = {}
    return {
        name: owner
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (owner := first.setdefault(id(parameter), name)) != name
    }
