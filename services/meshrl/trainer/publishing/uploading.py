"""How a version was published: what every publisher reports of it."""

from __future__ import annotations

from dataclasses import dataclass

from loguru import logger


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """How a version was published, and where the time went; a part that a transport does not have took 0 s.

    `snapshot_s`: rows cast and copied aside, on the training thread; `digest_s`: digests joined over the ranks;
    `write_s`: hashed and written or packed; `group_s`: engines met; `stage_s`: taken by the hub; `seal_s`;
    `wire_s`: broadcast.
    """

    version: int
    artifact_id: str
    root: bytes
    num_bytes: int
    snapshot_s: float = 0.0
    digest_s: float = 0.0
    write_s: float = 0.0
    group_s: float = 0.0
    stage_s: float = 0.0
    seal_s: float = 0.0
    wire_s: float = 0.0

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts that took time, by name."""
        names = ("snapshot", "digest", "write", "group", "stage", "seal", "wire")
        lengths = {name: float(getattr(self, f"{name}_s")) for name in names}
        return {name: length_s for name, length_s in lengths.items() if length_s}

    @property
    def seconds(self) -> float:
        return sum(self.parts_s.values())

    def log(self) -> None:
        """Says so in the log."""
        parts = ", ".join(f"{name} {length_s:.3f}" for name, length_s in self.parts_s.items())
        logger.info("version {} is published: {} bytes in {:.3f} s ({})",
                    self.version, self.num_bytes, self.seconds, parts)  # fmt: skip
