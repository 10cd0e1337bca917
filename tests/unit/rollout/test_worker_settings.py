"""A worker process gets the configuration that the service has."""

import math
from multiprocessing.reduction import ForkingPickler

from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.workers.process import WorkerSettings


def test_a_configuration_reaches_the_worker_unchanged():
    config = RolloutConfig(env=[{"id": "a", "args": {"most": math.inf, "least": None}}])
    settings = WorkerSettings(number=1, config=config, names=("a",), max_memory_mib=64)
    there = ForkingPickler.loads(ForkingPickler.dumps(settings))  # as multiprocessing does
    assert there == settings
    assert there.config.model_fields_set == config.model_fields_set
