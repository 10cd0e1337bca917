"""What the converter reads off annotations that releases of a library spell differently."""

from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from meshrl.wire.convert.by_annotation import dtype_of

T = TypeVar("T", bound=np.generic)
KeptAlias = TypeAliasType("KeptAlias", "np.ndarray[Any, np.dtype[T]]", type_params=(T,))  # as numpy 2.5 has NDArray


@pytest.mark.parametrize("annotation", [NDArray[np.int32], np.ndarray[Any, np.dtype[np.int32]], KeptAlias[np.int32]])
def test_the_type_of_a_vector_is_found_however_numpy_spells_its_alias(annotation: Any) -> None:
    assert dtype_of(annotation) == "int32"
