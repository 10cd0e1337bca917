"""Types for JSON that is read without a schema; each reader checks the fields that it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # the command line reads JSON, and needs no numpy for it
    from numpy.typing import NDArray

JsonObject: TypeAlias = Mapping[str, Any]
"""Values by name: a line of a run's files, a row of data, the body of an answer."""

Array: TypeAlias = "NDArray[Any]"
"""An array whose element type is told by its dtype alone."""
