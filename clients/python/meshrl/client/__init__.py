"""Async clients of the three services: `RolloutClient`, `TrainerClient` and `WeightSyncClient`. They need no torch."""

from meshrl.client.channel import ChannelOptions
from meshrl.client.rollout import RolloutClient
from meshrl.client.trainer import TrainerClient
from meshrl.client.weights import WeightSyncClient

__all__ = ["ChannelOptions", "RolloutClient", "TrainerClient", "WeightSyncClient"]
