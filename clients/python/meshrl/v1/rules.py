"""Generated from proto/meshrl/v1 by `make proto`; do not edit."""

from typing import Any

RULES: dict[str, dict[str, dict[str, Any]]] = {
    'meshrl.v1.AbortVersionRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
        'epoch': {'gte': 1},
    },
    'meshrl.v1.ActivateVersionRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
        'prepare_deadline_s': {'gt': 0.0, 'finite': True},
    },
    'meshrl.v1.AdapterSpec': {
        'rank': {'gte': 1},
        'alpha': {'finite': True},
        'dropout': {'lt': 1.0, 'gte': 0.0},
    },
    'meshrl.v1.BatchHeader': {
        'step': {'gte': 1},
        'digest': {'pattern': '^[0-9a-f]{64}$'},
        'num_micro_batches': {'gte': 1},
        'environments': {'min_items': 1},
        'routes_digest': {'pattern': '^[0-9a-f]{64}$', 'ignore': 'IGNORE_IF_ZERO_VALUE'},
    },
    'meshrl.v1.ByteRange': {
        'length': {'gte': 1},
    },
    'meshrl.v1.CancelRolloutsRequest': {
        'request_id': {'uuid': True, 'ignore': 'IGNORE_IF_ZERO_VALUE'},
    },
    'meshrl.v1.CloseRunRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
        'epoch': {'gte': 1},
    },
    'meshrl.v1.CreateRunRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
    },
    'meshrl.v1.DeleteRunRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
    },
    'meshrl.v1.DrainRequest': {
        'request_id': {'uuid': True, 'ignore': 'IGNORE_IF_ZERO_VALUE'},
        'deadline_s': {'gte': 0.0, 'finite': True},
    },
    'meshrl.v1.EnrollRequest': {
        'name': {'pattern': '^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$'},
        'hosts': {'max_items': 16},
    },
    'meshrl.v1.FetchManifestRequest': {
        'artifact_id': {'pattern': '^[0-9a-f]{64}$'},
    },
    'meshrl.v1.FetchRequest': {
        'artifact_id': {'pattern': '^[0-9a-f]{64}$'},
    },
    'meshrl.v1.GetCompiledRequest': {
        'key': {'pattern': '^[0-9a-f]{64}$'},
    },
    'meshrl.v1.HeldCall': {
        'call_id': {'min_len': 1, 'max_len': 256},
    },
    'meshrl.v1.KeepCompiledRequest': {
        'key': {'pattern': '^[0-9a-f]{64}$'},
        'digest': {'min_len': 32},
        'archive': {'min_len': 1, 'max_len': 50331648},
    },
    'meshrl.v1.OpenGroupRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
        'epoch': {'gte': 1},
        'store_address': {'min_len': 1, 'max_len': 256},
        'backend': {'in': ['nccl', 'gloo']},
        'num_senders': {'gte': 1},
        'deadline_s': {'gt': 0.0, 'finite': True},
    },
    'meshrl.v1.OptimizerSpec': {
        'type': {'in': ['adamw', 'muon', 'sgd'], 'ignore': 'IGNORE_IF_ZERO_VALUE'},
        'learning_rate': {'gt': 0.0, 'finite': True},
    },
    'meshrl.v1.RegisterRequest': {
        '': {'cel': [{'id': 'register.collective_backend', 'message': 'collective_backend: must be nccl or gloo with collective_ranks', 'expression': "this.collective_ranks == 0u || this.collective_backend in ['nccl', 'gloo']"}]},
        'engine_id': {'min_len': 1, 'max_len': 256},
        'url': {'pattern': '^https?://.*$'},
        'transports': {'cel': [{'id': 'register.transports', 'message': 'must name one that this hub knows', 'expression': 'this.exists(transport, transport in [1, 2, 3])'}]},
        'layout_signature': {'min_len': 1},
    },
    'meshrl.v1.ResumeRunRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
    },
    'meshrl.v1.RolloutServiceDrainRequest': {
        'request_id': {'uuid': True, 'ignore': 'IGNORE_IF_ZERO_VALUE'},
        'deadline_s': {'gte': 0.0, 'finite': True},
    },
    'meshrl.v1.RunRolloutsRequest': {
        'task': {'required': True},
        'request_id': {'uuid': True},
        'group_id': {'min_len': 1, 'max_len': 256},
        'environment': {'min_len': 1, 'max_len': 256},
        'group_size': {'gte': 1},
        'deadline_s': {'gt': 0.0, 'finite': True},
        'linger_s': {'gte': 0.0, 'finite': True},
    },
    'meshrl.v1.RunSpec': {
        'share': {'gt': 0.0, 'finite': True},
    },
    'meshrl.v1.Sampling': {
        'temperature': {'gte': 0.0, 'finite': True},
        'top_p': {'lte': 1.0, 'gt': 0.0},
        'top_k': {'gte': -1},
        'min_p': {'lte': 1.0, 'gte': 0.0},
        'max_tokens': {'gte': 1},
        'stop_token_ids': {'items': {'gte': 0}},
    },
    'meshrl.v1.SaveCheckpointRequest': {
        'request_id': {'uuid': True},
    },
    'meshrl.v1.ScheduleSpec': {
        'type': {'in': ['constant', 'linear', 'cosine', 'wsd'], 'ignore': 'IGNORE_IF_ZERO_VALUE'},
    },
    'meshrl.v1.SealVersionRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
        'epoch': {'gte': 1},
        'artifact_id': {'pattern': '^[0-9a-f]{64}$'},
    },
    'meshrl.v1.SleepEnginesRequest': {
        'deadline_s': {'gt': 0.0, 'finite': True},
    },
    'meshrl.v1.SuspendRunRequest': {
        'request_id': {'uuid': True},
        'run_id': {'min_len': 1, 'max_len': 256},
    },
    'meshrl.v1.WatchStepsRequest': {
        'bookmark_s': {'gte': 0.0, 'finite': True},
    },
    'meshrl.v1.WatchVersionsRequest': {
        'bookmark_s': {'gte': 0.0, 'finite': True},
    },
    'meshrl.v1.WeightSyncDrainRequest': {
        'request_id': {'uuid': True, 'ignore': 'IGNORE_IF_ZERO_VALUE'},
        'deadline_s': {'gte': 0.0, 'finite': True},
    },
    'meshrl.v1.WorkerHello': {
        'worker': {'pattern': '^[^/\\x00-\\x1f\\x7f-\\x9f]{1,256}$'},
        'incarnation': {'uuid': True},
        'environments': {'min_items': 1, 'cel': [{'id': 'worker.environments', 'message': 'must have names of their own', 'expression': 'this.map(environment, environment.name).unique()'}]},
    },
}
"""Constraints by message, then by field or oneof; those of a whole message are under the empty name."""
