"""The `orchestrator` section: the program's own keys, the environments of a run, and their algorithms."""

from meshrl.orchestrator.config.algorithms import TAUGHT, AdvantageConfig, AlgoConfig, TeacherConfig
from meshrl.orchestrator.config.environments import (
    EvalConfig,
    EvalEnvConfig,
    TrainEnvConfig,
    TrainEnvsConfig,
)
from meshrl.orchestrator.config.program import (
    DeadlinesConfig,
    LogprobCheckConfig,
    NewRunConfig,
    OrchestratorConfig,
    RolloutSamplesConfig,
)
