"""Any configuration survives being written as TOML and loaded again, whatever its values."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from meshrl.core.config import BaseConfig, dump_toml, load_config
from meshrl.core.config.shared import EnvConfig, SamplingConfig, WandbConfig


class Config(BaseConfig):
    """Every kind of value."""

    text: str = "x"
    maybe_text: str | None = "x"
    number: int = 0
    ratio: float = 0.0
    switch: bool | None = None
    numbers: list[int] = Field(default_factory=list)
    maybe_texts: list[str | None] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    path: Path = Path("outputs")
    env: list[EnvConfig] = Field(default_factory=list)
    wandb: WandbConfig | None = WandbConfig()
    sampling: SamplingConfig = SamplingConfig()


# "None" is how None is written where a key takes None, so it is no text of its own there.
plain_text = st.text(st.characters(codec="utf-8"), max_size=12)
text = plain_text.filter(lambda value: value != "None")
floats = st.floats(allow_nan=False)
free = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | floats | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(plain_text, free, max_size=3)
environments = st.builds(
    EnvConfig,
    id=text.filter(bool),
    name=st.none() | text.filter(bool),
    args=tables,
    ratio=st.floats(min_value=1e-300, allow_infinity=False),
)
configs = st.builds(
    Config,
    text=plain_text,
    maybe_text=st.none() | text,
    number=st.integers(-(2**63), 2**63 - 1),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    switch=st.none() | st.booleans(),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    maybe_texts=st.none() | st.lists(st.none() | text, max_size=3),
    options=tables,
    env=st.lists(environments, max_size=2),
    wandb=st.none() | st.builds(WandbConfig, name=st.none() | text, tags=st.lists(plain_text, max_size=2)),
    sampling=st.builds(SamplingConfig, temperature=st.none() | st.floats(0.0, 2.0)),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs") / "config.toml"


@settings(max_examples=80, deadline=None)
@given(config=configs)
def test_dump_and_load_give_the_same_configuration(path: Path, config: Config) -> None:
    dump_toml(config, path)
    assert load_config(Config, ["@", str(path)], prog="prog", environ={}) == config
