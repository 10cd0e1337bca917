"""The adapters that an engine serves: which version each run's requests get, and when an older one is unloaded.

New requests get a version once it is `serve`d; requests in flight stay on theirs, which is unloaded when the last of
them ends. No I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from meshrl.core.waiting import Pulse
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import ServedVersion

RETRY_AFTER_S = 1.0  # for a version that is not there yet, and for any other refused client
ROOM_DEADLINE_S = 60.0  # for requests on older versions to end, when a new one finds no place

Loaded = TypeVar("Loaded")


@dataclass(kw_only=True, eq=False)
class ServedAdapter(Generic[Loaded]):
    """A version of a run's adapter. `number` is unique, as versions of another epoch share their names."""

    run_id: str
    version: int
    number: int
    loaded: Loaded
    artifact_id: str = ""
    root: bytes = b""
    in_flight: int = 0
    newest: bool = False  # new requests of the run get it
    over: bool = False  # unloaded once nothing is in flight

    @property
    def name(self) -> str:
        return f"{self.run_id}@{self.version}"


class AdapterTable(Generic[Loaded]):
    """At most `max_adapters` at once, older ones with requests included."""

    def __init__(self, max_adapters: int, max_rank: int, unload: Callable[[ServedAdapter[Loaded]], None]) -> None:
        """`max_rank` is 0 if any rank fits; `unload` is called once for each adapter, when nothing uses it."""
        self.max_adapters, self.max_rank = max_adapters, max_rank
        self._unload = unload
        self._adapters: list[ServedAdapter[Loaded]] = []
        self._numbers = 0
        self._freed = Pulse()

    # --- versions ---------------------------------------------------------------------------

    async def room(self, run_id: str) -> int:
        """Waits for a place for a version of a run and returns its number.

        A version of the run that was added and never served makes way. Raises MeshError OVERLOADED when no place came.
        """
        for adapter in [a for a in self._adapters if a.run_id == run_id and not (a.newest or a.over)]:
            self._end(adapter)
        try:
            async with asyncio.timeout(ROOM_DEADLINE_S):
                while len(self._adapters) >= self.max_adapters:
                    await self._freed.next()
        except TimeoutError as error:
            held = ", ".join(f"{adapter.name} ({adapter.in_flight} requests)" for adapter in self._adapters)
            text = (
                f"this engine holds {self.max_adapters} adapters, which is all that it may: {held}; raise"
                " inference.max_loras"
            )
            raise MeshError(Reason.OVERLOADED, text) from error
        self._numbers += 1
        return self._numbers

    def add(self, run_id: str, version: int, number: int, loaded: Loaded) -> None:
        self._adapters.append(ServedAdapter(run_id=run_id, version=version, number=number, loaded=loaded))

    def serve(self, run_id: str, version: int, *, artifact_id: str = "", root: bytes = b"") -> int:
        """Gives new requests of a run the version added last; returns how many stay on older ones. Raises MeshError
        VERSION_NOT_SEALED when another version, or none, was added last."""
        adapter = next((a for a in reversed(self._adapters) if a.run_id == run_id and not a.over), None)
        if adapter is None or adapter.version != version:
            held = "nothing" if adapter is None else f"version {adapter.version}"
            text = f"version {version} of run {run_id!r} is not loaded here, but {held}; stage it first"
            raise MeshError(Reason.VERSION_NOT_SEALED, text)
        older = [a for a in self._adapters if a.run_id == run_id and a is not adapter]
        adapter.newest, adapter.artifact_id, adapter.root = True, artifact_id, root
        for each in older:
            self._end(each)
        return sum(each.in_flight for each in older)

    def retire(self, run_id: str) -> None:
        for adapter in [a for a in self._adapters if a.run_id == run_id]:
            self._end(adapter)

    def _end(self, adapter: ServedAdapter[Loaded]) -> None:
        adapter.newest, adapter.over = False, True
        self._drop_unused(adapter)

    def _drop_unused(self, adapter: ServedAdapter[Loaded]) -> None:
        if adapter.over and not adapter.in_flight and adapter in self._adapters:
            self._adapters.remove(adapter)
            self._unload(adapter)
            self._freed.beat()

    # --- reading ----------------------------------------------------------------------------

    @property
    def newest(self) -> dict[str, ServedAdapter[Loaded]]:
        return {adapter.run_id: adapter for adapter in self._adapters if adapter.newest}

    @property
    def served(self) -> tuple[ServedVersion, ...]:
        return tuple(
            ServedVersion(
                run_id=adapter.run_id,
                version=adapter.version,
                artifact_id=adapter.artifact_id,
                root=adapter.root,
                in_flight=adapter.in_flight,
                newest=adapter.newest,
            )
            for adapter in self._adapters
        )

    # --- requests ---------------------------------------------------------------------------

    @contextmanager
    def using(self, policy: str) -> Iterator[ServedAdapter[Loaded] | None]:
        """The adapter of a policy while a request runs; None is the base model.

        `RUN` and `RUN@` are the newest version of a run, `RUN@VERSION` is one of its versions. An empty policy is the
        engine's only run, or else the base model. Raises MeshError VERSION_NOT_AVAILABLE for a version that is not here
        yet, VERSION_SUPERSEDED for an older one that is gone, and INVALID_REQUEST for an empty policy with several
        runs.
        """
        adapter = self._find(policy)
        if adapter is None:
            yield None
            return
        adapter.in_flight += 1
        try:
            yield adapter
        finally:
            adapter.in_flight -= 1
            self._drop_unused(adapter)

    def _find(self, policy: str) -> ServedAdapter[Loaded] | None:
        newest = self.newest
        if not policy:
            if len(newest) > 1:
                runs = ", ".join(sorted(newest))
                text = f"this engine serves the runs {runs}: name one of them as the model, as RUN or RUN@VERSION"
                raise MeshError(Reason.INVALID_REQUEST, text)
            return next(iter(newest.values()), None)
        run_id, _, version = policy.rpartition("@") if "@" in policy else (policy, "", "")
        adapter = newest.get(run_id)
        if version and (adapter is None or str(adapter.version) != version):
            named = (a for a in reversed(self._adapters) if a.run_id == run_id and str(a.version) == version)
            adapter = next((a for a in named if a.artifact_id), None)
        if adapter is None:
            held = ", ".join(sorted(each.name for each in self._adapters if each.newest)) or "none"
            wanted = f"version {version} of run {run_id!r}" if version else f"run {run_id!r}"
            if run_id in newest and version.isdecimal() and int(version) < newest[run_id].version:
                text = f"{wanted} is here no more; ask for {newest[run_id].name}, or for {run_id!r}, its newest version"
                raise MeshError(Reason.VERSION_SUPERSEDED, text)
            text = f"{wanted} is not here yet; this engine serves {held}"
            raise MeshError(Reason.VERSION_NOT_AVAILABLE, text, retry_after_s=RETRY_AFTER_S)
        return adapter
