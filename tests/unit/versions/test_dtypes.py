"""torch, safetensors and the contract mean the same element types."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshrl.versions.layout import SAFETENSORS_DTYPES, TORCH_DTYPES, dtype_name
from meshrl.wire.tensors import DTYPES


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_type_keeps_its_name_and_size_in_torch_and_in_safetensors(name: str, tmp_path: Path) -> None:
    dtype = TORCH_DTYPES[name]
    assert (dtype_name(dtype), dtype.itemsize) == (name, DTYPES[name].itemsize)
    assert SAFETENSORS_DTYPES[DTYPES[name].safetensors] == dtype
    save_file({"w": torch.ones(2, 3).to(dtype)}, tmp_path / "w.safetensors")
    header = (tmp_path / "w.safetensors").read_bytes()
    assert f'"dtype":"{DTYPES[name].safetensors}"'.encode() in header


def test_a_type_that_the_contract_lacks_keeps_its_torch_name() -> None:
    assert dtype_name(torch.complex64) == "complex64"
