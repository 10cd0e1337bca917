"""The base class of every configuration section."""

from pydantic import BaseModel, ConfigDict


class BaseConfig(BaseModel):
    """A section of the configuration: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
