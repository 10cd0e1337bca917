"""What the converter reads off annotations that releases of a library spell differently."""

import functools
import operator
import types
import typing
from typing import Any, TypeVar

import numpy as np
import pytest
from typing_extensions import TypeAliasType

from meshrl.wire.convert import micro_batches
from meshrl.wire.types import MicroBatch

T = TypeVar("T", bound=np.generic)
KeptAlias = TypeAliasType("KeptAlias", "np.ndarray[Any, np.dtype[T]]", type_params=(T,))  # as numpy 2.5 has NDArray


def test_tensors_of_a_micro_batch_are_known_where_numpy_keeps_its_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(annotation: Any) -> Any:
        if typing.get_origin(annotation) is np.ndarray:
            return KeptAlias[typing.get_args(typing.get_args(annotation)[1])[0]]
        if typing.get_origin(annotation) in (types.UnionType, typing.Union):
            return functools.reduce(operator.or_, map(kept, typing.get_args(annotation)))
        return annotation

    hints = {name: kept(hint) for name, hint in typing.get_type_hints(MicroBatch).items()}
    monkeypatch.setattr(micro_batches, "get_type_hints", lambda _: hints)
    assert micro_batches._tensors(may_be_unset=False) == micro_batches.TENSORS
    assert micro_batches._tensors(may_be_unset=True) == micro_batches.OPTIONAL
    assert len(micro_batches.TENSORS) == 8
