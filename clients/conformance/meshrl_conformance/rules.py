"""The rules that `meshrl conformance` checks: id and text, a sentence of docs/contract.md or the protos.

The modules beside have one check for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EVERY = ("rollout", "trainer", "weights")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`full` rules are checked by work that changes the server."""

    sentence: str
    services: tuple[str, ...] = EVERY
    full: bool = False


def _of(service: str, sentence: str, *, full: bool = False) -> Rule:
    return Rule(sentence=sentence, services=(service,), full=full)


_EVERY_SERVICE = {
    "health.service": "grpc.health.v1.Health answers SERVING for the full name of the service once it takes calls.",
    "health.server": "grpc.health.v1.Health answers SERVING for the empty name, the whole server, as well.",
    "health.watch": "Health/Watch is served, and sends the state at once.",
    "contract.version": 'The first call answers with the contract version of the server, "1.N".',
    "contract.major": "Another major version ends the first call with FAILED_PRECONDITION (CONTRACT_MISMATCH).",
    "contract.minor": "Another minor version, or none, is accepted.",
    "contract.unknown-fields": "A peer ignores fields that it does not know.",
    "limits.message": "Messages of up to 64 MiB are taken; of a trainer, those of up to its max_message_bytes.",
    "limits.identifiers": "Identifiers have 1 to 256 characters; others are INVALID_ARGUMENT (INVALID_REQUEST).",
    "errors.fields": "INVALID_ARGUMENT carries BadRequest with every field that is at fault, by its path.",
    "errors.size": "The details of an error stay below 8 KiB, whatever was sent.",
    "errors.details": "A call that fails carries google.rpc.Status with ErrorInfo: domain meshrl, a reason of the"
    " catalogue that belongs to its gRPC status.",
}

_ROLLOUT = {
    "rollout.environments": "ListEnvironments lists each hosted environment under a name of its own.",
    "rollout.unknown-environment": "RunRollouts of an environment that is not hosted is NOT_FOUND"
    " (UNKNOWN_ENVIRONMENT).",
    "rollout.unknown-task": "RunRollouts of a task_index that a finite taskset does not have is NOT_FOUND"
    " (UNKNOWN_TASK).",
    "rollout.sampling": "Sampling outside its range is INVALID_ARGUMENT, by the path of the field.",
    "rollout.version": "While no engine holds the required version, RunRollouts is FAILED_PRECONDITION"
    " (VERSION_NOT_AVAILABLE) with RetryInfo.",
    "rollout.cancel": "CancelRollouts of a group that is not running is not an error.",
}

_ROLLOUT_FULL = {
    "rollout.summary": "The last event of a group is its summary: finished + failed + cancelled is the group size,"
    " and each is what was streamed.",
    "rollout.identity": "Every rollout has an id of its own and carries the group and the environment of the request.",
    "rollout.sample": "Each sample keeps the rules of Sample: shapes, loss_mask, logprobs, version_spans,"
    " message_spans, temperature.",
    "rollout.presence": "From contract 1.1 on a rollout has its reward and each sample its temperature, also where"
    " these are 0.",
    "rollout.duplicate": "A request_id that is running or was seen lately is ALREADY_EXISTS (DUPLICATE_REQUEST).",
    "rollout.reattach": "With linger_s a group goes on without its stream: the same request with after_seq gets the"
    " events behind that number again, each once and unchanged.",
    "rollout.deadline": "A group ends within 10 s of its deadline_s; rollouts that had not ended are failures"
    " (DEADLINE_PASSED).",
}

_TRAINER = {
    "trainer.info": "GetTrainer returns at least one run, and sizes above 0.",
    "trainer.runs": "ListRuns lists the runs that GetTrainer returns.",
    "trainer.revisions": "WatchSteps streams the history after a revision, and revisions grow by one.",
    "trainer.bookmarks": "WatchSteps from now on begins with a bookmark of the newest revision, and sends one after"
    " each bookmark_s without an event.",
    "trainer.expired": "WatchSteps after a revision that is not there is OUT_OF_RANGE (REVISION_EXPIRED), with the"
    " oldest that is in its metadata.",
    "trainer.unknown-run": "A run that is not here is NOT_FOUND (UNKNOWN_RUN).",
    "trainer.header": "The first message of SubmitBatch is the header; one without is INVALID_ARGUMENT.",
    "trainer.next-step": "SubmitBatch of a step that is not the next one is FAILED_PRECONDITION (STEP_OUT_OF_ORDER).",
}

_TRAINER_FULL = {
    "trainer.digest": "A batch whose digest does not match its tensors is DATA_LOSS (BATCH_DIGEST_MISMATCH).",
    "trainer.rows": "A batch that cannot be trained is INVALID_ARGUMENT, with a path such as"
    " micro_batches[0].token_ids for each row at fault.",
    "trainer.step": "Step n trains on batch n and makes version n: QUEUED, RUNNING, then DONE with the version.",
    "trainer.repeat": "The same batch again returns the first answer.",
    "trainer.conflict": "Another digest for a known step is ALREADY_EXISTS (BATCH_CONFLICT).",
    "trainer.save": "SaveCheckpoint is idempotent by request_id; the same id with another request is ALREADY_EXISTS"
    " (DUPLICATE_REQUEST).",
    "trainer.checkpoints": "SaveCheckpoint with return_at_once answers while it saves; ListCheckpoints lists it once,"
    " newest first, page by page, until it is DURABLE.",
    "trainer.own-run": "DeleteRun of the trainer's own run is FAILED_PRECONDITION (RUN_PROTECTED).",
}

_WEIGHTS = {
    "weights.engines": "ListEngines lists each engine once; one that is routable serves a version.",
    "weights.unknown-version": "A version that the hub does not have is NOT_FOUND (UNKNOWN_VERSION).",
    "weights.artifact": "The artifact id is the BLAKE3 of the manifest in canonical form.",
    "weights.manifest": "The tensors of a manifest cover its byte stream in order, and its root is made of their"
    " digests.",
    "weights.watch": "WatchVersions sends the current state of each version first; revisions grow.",
    "weights.lease": "A session whose lease the hub does not know ends with NOT_FOUND (LEASE_EXPIRED).",
}

_WEIGHTS_FULL = {
    "weights.bookmarks": "WatchVersions from now on begins with a bookmark, and sends one after each bookmark_s without"
    " a change.",
    "weights.epoch": "An epoch beyond the next is INVALID_ARGUMENT, an older one FAILED_PRECONDITION (STALE_EPOCH).",
    "weights.resume": "An upload that ends early lists the chunks that are missing; the same artifact again resumes.",
    "weights.checksum": "A chunk whose checksum is wrong is DATA_LOSS (CHUNK_CORRUPT).",
    "weights.seal": "SealVersion while chunks are missing is FAILED_PRECONDITION (CHUNKS_MISSING); of a complete"
    " version it is SEALED, however often it is asked.",
    "weights.digests": "A version whose bytes do not match its manifest is DATA_LOSS.",
    "weights.fetch": "Fetch streams the byte ranges that were asked for, each chunk with its CRC32C.",
    "weights.conflict": "A version of the same epoch with other content is ALREADY_EXISTS (VERSION_CONFLICT).",
    "weights.request-id": "A request_id that comes again with another request is ALREADY_EXISTS (DUPLICATE_REQUEST).",
    "weights.not-ready": "ActivateVersion with too few engines is DEADLINE_EXCEEDED (ENGINES_NOT_READY), and the"
    " version stays sealed.",
    "weights.parts": "CreateVersion takes a manifest as a header and parts; FetchManifest returns the same manifest in"
    " parts of at most 1 MiB.",
    "weights.content": "ActivateVersion and AbortVersion that name another artifact_id, or ActivateVersion another"
    " epoch, end with ALREADY_EXISTS (VERSION_CONFLICT).",
    "weights.abort": "AbortVersion drops a version that is not committing, however often it is asked.",
}

RULES: Mapping[str, Rule] = {
    **{name: Rule(sentence=sentence) for name, sentence in _EVERY_SERVICE.items() if name != "errors.details"},
    **{name: _of("rollout", sentence) for name, sentence in _ROLLOUT.items()},
    **{name: _of("rollout", sentence, full=True) for name, sentence in _ROLLOUT_FULL.items()},
    **{name: _of("trainer", sentence) for name, sentence in _TRAINER.items()},
    **{name: _of("trainer", sentence, full=True) for name, sentence in _TRAINER_FULL.items()},
    **{name: _of("weights", sentence) for name, sentence in _WEIGHTS.items()},
    **{name: _of("weights", sentence, full=True) for name, sentence in _WEIGHTS_FULL.items()},
    "errors.details": Rule(sentence=_EVERY_SERVICE["errors.details"]),
}
"""In the order of the checks; errors.details looks at every error before it."""
