"""Which role may call which RPC: one table. An RPC that it does not name is refused.

A caller's role is in its certificate or token; a server without credentials asks for neither. Health and reflection are
open to everybody. A test checks that every RPC of proto/ is in the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.client.trust import Role

_DRIVES = frozenset({Role.ORCHESTRATOR, Role.OPERATOR})
_LOOKS = _DRIVES | {Role.VIEWER}
_MEMBERS = frozenset(Role)
_TAKES_VERSIONS = frozenset({Role.AGENT, Role.RELAY})
_PUBLISHES = frozenset({Role.PUBLISHER})

ROLES_OF: Mapping[str, frozenset[Role]] = {
    "meshrl.v1.EnrollmentService/Enroll": frozenset(),  # at its own port it looks at join tokens itself
    "meshrl.v1.EnrollmentService/Renew": _MEMBERS,
    "meshrl.v1.EnrollmentService/ListRevoked": _MEMBERS,
    "meshrl.v1.RolloutService/ListEnvironments": _LOOKS,
    "meshrl.v1.RolloutService/RunRollouts": _DRIVES,
    "meshrl.v1.RolloutService/CancelRollouts": _DRIVES,
    "meshrl.v1.RolloutService/GetRolloutStatus": _LOOKS,
    "meshrl.v1.RolloutExchange/Attach": frozenset({Role.ROLLOUT}),
    "meshrl.v1.RolloutExchange/ListWorkers": _LOOKS,
    "meshrl.v1.TrainerService/GetTrainer": _LOOKS,
    "meshrl.v1.TrainerService/SubmitBatch": frozenset({Role.ORCHESTRATOR}),
    "meshrl.v1.TrainerService/WatchSteps": _LOOKS,
    "meshrl.v1.TrainerService/SaveCheckpoint": _DRIVES,
    "meshrl.v1.TrainerService/CreateRun": _DRIVES,
    "meshrl.v1.TrainerService/ListRuns": _LOOKS,
    "meshrl.v1.TrainerService/DeleteRun": _DRIVES,
    "meshrl.v1.TrainerService/Drain": _DRIVES,
    "meshrl.v1.WeightSync/Register": _TAKES_VERSIONS,
    "meshrl.v1.WeightSync/Session": _TAKES_VERSIONS,
    "meshrl.v1.WeightSync/CreateVersion": _PUBLISHES,
    "meshrl.v1.WeightSync/SealVersion": _PUBLISHES,
    "meshrl.v1.WeightSync/AbortVersion": _PUBLISHES,
    "meshrl.v1.WeightSync/ActivateVersion": _DRIVES,
    "meshrl.v1.WeightSync/WatchVersions": _MEMBERS,
    "meshrl.v1.WeightSync/GetManifest": _TAKES_VERSIONS | {Role.PUBLISHER, Role.OPERATOR},
    "meshrl.v1.WeightSync/Fetch": _TAKES_VERSIONS | {Role.OPERATOR},
    "meshrl.v1.WeightSync/OpenGroup": _PUBLISHES,
    "meshrl.v1.WeightSync/SleepEngines": _DRIVES,
    "meshrl.v1.WeightSync/ListEngines": _LOOKS | {Role.PUBLISHER, Role.ROLLOUT},
}
