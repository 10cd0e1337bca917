"""Opens runs on rank 0, the trainer's own and added ones: first their publication, then their training.

Called on the training thread, which captures each run's first version. Publications run on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future

from loguru import logger
from opentelemetry import trace

from meshrl.client import WeightSyncClient
from meshrl.core.telemetry.waits import Waits
from meshrl.trainer.build import TrainerParts
from meshrl.trainer.publishing.build import Publication, PublishOptions, open_publication, open_run, settings_of_added
from meshrl.trainer.publishing.publisher import PublishReport
from meshrl.trainer.publishing.snapshots import PublicationSettings
from meshrl.trainer.ranks.commands import CommandSender
from meshrl.trainer.ranks.rank_runs import RankRun
from meshrl.trainer.run_training import RunTraining, RunVersions
from meshrl.trainer.runs.settings import RunSettings
from meshrl.trainer.runs.steps import TrainingQueue
from meshrl.versions.snapshot import Captured
from meshrl.wire.errors import MeshError


class OpenRun:
    """A run that trains and publishes."""

    def __init__(
        self,
        training: RunTraining,
        publication: Publication,
        initial: Captured,
        options: PublishOptions,
        hub: WeightSyncClient,
        epoch: int,
    ) -> None:
        self.training = training
        self._publication, self._options, self._hub, self._epoch = publication, options, hub, epoch
        self._version = training.state.step_done
        self._initial: Captured | None = initial

    async def first(self) -> None:
        """Publishes the version that the run starts with. Waits for an absent hub, up to hub_deadline_s. Raises
        MeshError and OSError."""
        deadline = time.monotonic() + self._options.hub_deadline_s
        while self._initial is not None:
            try:
                await self._publication.publisher.publish(self._version, self._initial)
            except MeshError as error:
                if not error.retryable or time.monotonic() > deadline:
                    raise
                logger.warning("no hub at {} yet: {}", self._options.broadcast.address, error)
                await asyncio.sleep(max(1.0, error.retry_after_s or 0.0))
            else:
                self._initial = None  # its weights must not live as long as the run

    async def retire(self) -> None:
        """Hub and engines let go of the run. Raises MeshError."""
        await self._hub.close_run(self.training.state.run_id, self._epoch)

    async def close(self) -> None:
        await self._publication.close()


class RunOpener:
    """Made on the event loop that publications run on."""

    def __init__(
        self,
        parts: TrainerParts,
        options: PublishOptions,
        commands: CommandSender,
        hub: WeightSyncClient,
        tracer: trace.Tracer,
        waits: Waits,
        *,
        max_failed_steps: int,
    ) -> None:
        self._parts, self._options, self._commands, self._hub = parts, options, commands, hub
        self._tracer, self._waits, self._max_failed_steps = tracer, waits, max_failed_steps
        self._loop = asyncio.get_running_loop()
        self._decided: PublicationSettings | None = None

    def open_own(
        self,
        decided: Future[PublicationSettings],
        queue: TrainingQueue,
        settings: RunSettings,
        environment: Mapping[str, str],
    ) -> OpenRun:
        """Opens the first run, once `decided` has how versions leave."""
        opened = open_publication(decided, self._options, self._parts, self._commands, self._hub, environment)
        self._decided = decided.result()
        return self._open(self._parts.own, queue, settings, self._decided, *opened, own=True)

    def open(self, run: RankRun, queue: TrainingQueue, settings: RunSettings, epoch: int) -> OpenRun:
        """Opens a run beside it, whose versions leave as adapters."""
        assert self._decided is not None, "the trainer's own run is opened before others"
        decided = settings_of_added(self._decided, epoch=epoch, folder=self._options.output_dir)
        opened = open_run(decided, self._options, self._parts, run.state, self._commands, self._hub)
        return self._open(run, queue, settings, decided, *opened, own=False)

    def _open(
        self,
        run: RankRun,
        queue: TrainingQueue,
        settings: RunSettings,
        decided: PublicationSettings,
        publication: Publication,
        initial: Captured,
        *,
        own: bool,
    ) -> OpenRun:
        publisher = publication.publisher

        def publish(version: int, captured: Captured, traceparent: str) -> Future[PublishReport]:
            return asyncio.run_coroutine_threadsafe(publisher.publish(version, captured, traceparent), self._loop)

        training = RunTraining(
            self._parts.learner,
            run,
            queue,
            RunVersions(
                capture=publication.snapshotter.capture,
                publish=publish,
                progress=publisher.progress,
                stall_s=self._options.publish_deadline_s,
            ),
            self._commands,
            self._tracer,
            ckpt=settings.ckpt,
            own=own,
            max_failed_steps=self._max_failed_steps,
            waits=self._waits,
            release=self._parts.release,
        )
        return OpenRun(training, publication, initial, self._options, self._hub, decided.epoch)
