"""A full copy of the weights in host memory, from which an agent stages versions that come as deltas.

Between two deltas each tensor is guarded by a BLAKE3 hash, which is computed while the version is staged and checked
while the next delta is decoded: a bit that flips in memory never reaches the engine. Blocking, for any thread; calls
are carried out one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, islice

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from meshrl.versions.deltas.codec import DeltaError, Packed, batches, read_stream, table_end, unpack, words_of
from meshrl.versions.deltas.digests import Differences, Digester, Edit, lanes_of, with_lanes
from meshrl.versions.deltas.words import from_ordered, ordered
from meshrl.versions.files import HostBytes
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import result_root
from meshrl.wire.types import Manifest


class WeightImage:
    """The byte stream of the version of `manifest`, whose tensors have `sum128` digests."""

    def __init__(self, manifest: Manifest, held: HostBytes, *, num_threads: int = 1) -> None:
        self.manifest, self.held = manifest, held
        self._bytes = held.parts[0][1]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="weight-image")
        self._lock = threading.Lock()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="weight-image-hash")  # one after the other
        self._at_rest: list[bytes] = []
        self._hashing.submit(self._hash_at_rest)

    @property
    def root(self) -> bytes:
        return self.manifest.result_root

    def apply(
        self, manifest: Manifest, delta: NDArray[np.uint8], wait_for: Callable[[int], object] = lambda end: None
    ) -> None:
        """Goes to the version of `manifest` by its delta, which may still be arriving.

        `wait_for` returns once the bytes up to an offset are here. Raises MeshError as it does, and DIGEST_MISMATCH,
        with nothing changed, where the delta is not for this image, does not lead to the manifest's root, or where the
        image changed at rest.
        """
        with self._lock:
            if manifest.base_root != self.root:
                raise _refused(manifest, f"it is for other weights than those of version {self.manifest.version}")
            checking = self._hashing.submit(self._changed)
            try:
                at = table_end(delta, wait_for)
                wait_for(at)
                pieces = read_stream(delta)
                if pieces and pieces[-1].run.start + pieces[-1].run.values * pieces[-1].run.width > len(self._bytes):
                    raise DeltaError("it changes what lies beyond the weights")
                digester = Digester(manifest.tensors)
                of_batches = batches(pieces)
                sizes = (sum(piece.num_bytes for piece in batch) for batch in of_batches)

                def edit_of(batch: Sequence[Packed], end: int) -> tuple[Edit, Differences]:
                    wait_for(end)
                    return self._edit(batch, digester)

                pairs = list(self._threads.map(edit_of, of_batches, islice(accumulate(sizes, initial=at), 1, None)))
            except DeltaError as error:
                raise _refused(manifest, str(error)) from error
            edits = [edit for edit, _ in pairs]
            lanes = digester.after(
                lanes_of(self.manifest.tensors), (found for _, found in pairs), self._bytes.take, edits
            )
            reached = with_lanes(self.manifest.tensors, lanes)
            if result_root(reached) != manifest.result_root:
                raise _refused(manifest, "it does not lead to the root of the version")
            self._refuse_changed(manifest, checking)

            def write(edit: Edit) -> None:
                words_of(self._bytes, edit.run)[edit.places] = edit.new

            list(self._threads.map(write, edits))
            self.manifest = manifest
            self._hashing.submit(self._hash_at_rest)

    def check(self) -> None:
        """Raises MeshError DIGEST_MISMATCH where the image changed at rest."""
        with self._lock:
            self._refuse_changed(self.manifest, self._hashing.submit(self._changed))

    def wait_until_hashed(self) -> None:
        """Until the tensors in the image are hashed: from then on a bit that flips is found."""
        self._hashing.submit(lambda: None).result()

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._hashing.shutdown(wait=False)
        self.held.release()

    def _edit(self, batch: Sequence[Packed], digester: Digester) -> tuple[Edit, Differences]:
        found = unpack(*batch)
        old = words_of(self._bytes, found.run).take(found.places)
        edit = Edit(run=found.run, places=found.places, old=old, new=from_ordered(ordered(old) + found.steps))
        return edit, digester.differences(edit) if found.run.width > 1 else {}

    def _refuse_changed(self, manifest: Manifest, checking: Future[str | None]) -> None:
        if (name := checking.result()) is not None:
            text = f"tensor {name!r} of version {self.manifest.version} changed while it lay in memory"
            raise _refused(manifest, text)

    def _changed(self) -> str | None:
        hashes = zip(self.manifest.tensors, self._hashes(), self._at_rest, strict=True)
        return next((entry.name for entry, found, expected in hashes if found != expected), None)

    def _hash_at_rest(self) -> None:
        self._at_rest = self._hashes()

    def _hashes(self) -> list[bytes]:
        return [blake3(self.held.of(entry).data, max_threads=blake3.AUTO).digest() for entry in self.manifest.tensors]


def _refused(manifest: Manifest, why: str) -> MeshError:
    return MeshError(Reason.DIGEST_MISMATCH, f"the delta to version {manifest.version} is refused: {why}")
