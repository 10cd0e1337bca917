"""Activates versions on the engines through the weight hub, and decides what to do when it cannot."""

from __future__ import annotations

import asyncio
from functools import partial

from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.core.clock import Clock
from meshrl.orchestrator.config import DeadlinesConfig
from meshrl.orchestrator.peers.step_watcher import StepWatcher
from meshrl.sampling.retry import AWAY, Patience, RunError, failed, persist
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Activation, ActivationPolicy

_SERVICE = "weight hub"
SLEEP_MARGIN_S = 5.0  # of the hub's answer beyond the deadline that it keeps itself
LOOK_S = 0.2  # between two looks whether a version is there
_NOT_THERE_YET = frozenset({Reason.UNKNOWN_VERSION, Reason.VERSION_NOT_SEALED, Reason.UNKNOWN_RUN})
_LASTING = frozenset({Reason.OUT_OF_MEMORY.name, Reason.LAYOUT_MISMATCH.name, Reason.NOT_SUPPORTED.name})
"""Refusals of a version that waiting does not cure."""
_GONE = frozenset({Reason.UNKNOWN_VERSION, Reason.VERSION_SUPERSEDED, Reason.STALE_EPOCH})
"""A newer trainer took over."""


class VersionRelay:
    """Commits versions of one run on a pool's engines, once `min_ready` have it."""

    def __init__(
        self,
        client: WeightSyncClient,
        *,
        run_id: str,
        policy: ActivationPolicy,
        deadlines: DeadlinesConfig,
        engine_pool: str = "",
        min_ready: int = 0,
        clock: Clock,
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._policy = policy
        self._deadlines = deadlines
        self._engine_pool = engine_pool
        self._min_ready = min_ready
        self._clock = clock

    async def wait_for_engines(self) -> None:
        """Raises RunError after startup_s."""
        address, deadline_s = self._client.address, self._deadlines.startup_s
        wanted = max(1, self._min_ready)
        give_up_at_s = self._clock.now() + deadline_s
        patience = Patience(unreachable_s=deadline_s, retry_s=deadline_s)
        while True:
            try:
                engines = await persist(
                    lambda: self._client.list_engines(self._engine_pool), patience, clock=self._clock
                )
            except MeshError as error:
                raise failed(_SERVICE, address, "listing engines", error) from error
            if len(engines) >= wanted:
                return
            if self._clock.now() >= give_up_at_s:
                raise RunError(
                    f"{_SERVICE} at {address} has {len(engines)} inference engines after {deadline_s:g} s,"
                    f" need {wanted};"
                    f" start `inference` with --weight-broadcast.address {address}, or name engines that run already"
                    " in orchestrator.client.base_url of rl, or in --engines of `weights`"
                )
            await self._clock.sleep(0.1)

    async def activate_first(self, version: int) -> Activation:
        """Commits a run's first version once the trainer has published it. Raises RunError, at once if every engine has
        refused it for a lasting reason."""
        startup_s = self._deadlines.startup_s
        patience = Patience(unreachable_s=startup_s, retry_s=startup_s, also=_NOT_THERE_YET)
        doing = f"activating version {version}, which the run starts from,"
        try:
            return await persist(lambda: self._commit_first(version, startup_s, doing), patience, clock=self._clock)
        except MeshError as error:
            raise failed(_SERVICE, self._client.address, doing, error) from error

    async def _commit_first(self, version: int, startup_s: float, doing: str) -> Activation:
        try:
            return await self._commit(version, startup_s)
        except MeshError as error:
            if error.metadata and error.reason is Reason.ENGINES_NOT_READY:
                engines = await self._client.list_engines(self._engine_pool)
                faults = [engine.last_fault for engine in engines]
                if all(fault is not None and fault.reason in _LASTING for fault in faults):
                    raise failed(_SERVICE, self._client.address, doing, error) from error
            raise

    async def activate(self, version: int, watcher: StepWatcher, artifact_id: str = "") -> Activation | None:
        """Commits a step's version, over restarts of the trainer; None when engines keep the one before. A trainer that
        comes back at an earlier step makes the version again, one at a later step never does. Raises RunError when the
        hub is gone."""
        deadlines = self._deadlines
        give_up_at_s = self._clock.now() + deadlines.startup_s
        while watcher.step <= version:
            epoch = watcher.epoch
            commit = partial(self._commit, version, deadlines.activation_s, artifact_id)
            try:
                patience = Patience(unreachable_s=deadlines.unreachable_s, retry_s=0.0)
                return await persist(commit, patience, clock=self._clock)
            except MeshError as error:
                if error.reason is Reason.VERSION_CONFLICT and artifact_id:
                    logger.warning(f"the trainer has made version {version} anew, which is activated instead: {error}")
                    artifact_id = ""
                    continue
                if error.reason in AWAY:
                    doing = f"activating version {version}"
                    raise failed(_SERVICE, self._client.address, doing, error) from error
                if error.reason not in _GONE:
                    logger.error(f"version {version} was not activated, engines keep serving the one before: {error}")
                    return None
                if version == watcher.step and self._clock.now() < give_up_at_s:  # its process has yet to publish it
                    await self._clock.sleep(LOOK_S)
                    continue
                logger.warning(f"version {version} is gone, so the trainer has restarted: {error}")
                if not await watcher.restarts(epoch) or watcher.step < version:
                    return None
        logger.warning(f"version {version} is skipped: the trainer went on from step {watcher.step}")
        return None

    async def sleep_engines(self) -> None:
        """Has engines give their memory back until the next version. A failure is only a warning."""
        deadline_s = self._deadlines.sleep_s
        try:
            async with asyncio.timeout(deadline_s + SLEEP_MARGIN_S):
                outcome = await self._client.sleep_engines(self._engine_pool, deadline_s=deadline_s)
        except (MeshError, TimeoutError) as error:
            why = str(error) or f"the {_SERVICE} did not answer in time"
            logger.warning(f"engines were not put to sleep, and the step goes on beside them: {why}")
        else:
            if outcome.awake:
                logger.warning(f"{outcome.awake} engines stay awake while the trainer trains, {outcome.asleep} sleep")

    async def _commit(self, version: int, prepare_deadline_s: float, artifact_id: str = "") -> Activation:
        return await self._client.activate_version(
            run_id=self._run_id,
            version=version,
            policy=self._policy,
            min_ready=self._min_ready,
            prepare_deadline_s=prepare_deadline_s,
            artifact_id=artifact_id,
        )
