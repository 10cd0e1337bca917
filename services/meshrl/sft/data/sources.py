"""Opens the file, folder or dataset that `data.name` names, as rows that are read on demand."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from loguru import logger

from meshrl.core.huggingface import ADVICE, NO_ANSWER, give_up_on_silence, told
from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.conversations import DataError, Row

if TYPE_CHECKING:
    from datasets import Dataset


SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` of datasets leaves in a folder


class DataRows(Sequence[Row]):
    """The rows of one part of the data. `identity` differs where the data does, over restarts too."""

    identity: str

    def where(self, index: int) -> str:
        return f"row {index}"


class JsonLines(DataRows):
    """A .jsonl file; only the offsets of its lines are in memory."""

    def __init__(self, path: Path) -> None:
        """Raises DataError when there is no such file."""
        self._path = path
        offsets: list[int] = []
        numbers: list[int] = []
        at = checksum = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        offsets.append(at)
                        numbers.append(number)
                    at += len(line)
                    checksum = zlib.crc32(line, checksum)
        except OSError as error:
            raise DataError(f"data.name {str(path)!r} cannot be read: {error.strerror}") from error
        self._offsets, self._numbers = np.array(offsets, dtype=np.int64), np.array(numbers, dtype=np.int64)
        self.identity = f"{len(offsets)} rows, crc32 {checksum:08x}"

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._numbers[index]}"

    def __getitem__(self, index: Any) -> Any:
        with self._path.open("rb") as file:
            file.seek(int(self._offsets[index]))
            line = file.readline()
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.where(index)}: not JSON ({error}); each line must be one object") from error
        return _object(row, self.where(index))


class _JsonList(DataRows):
    def __init__(self, path: Path) -> None:
        """Raises DataError for a file that is no list of objects."""
        self._path = path
        content = path.read_bytes()
        try:
            rows = json.loads(content)
        except ValueError as error:
            raise DataError(f"{path}: not JSON ({error}); it begins as a list of rows") from error
        self._rows = [_object(row, self.where(index)) for index, row in enumerate(rows)]
        self.identity = f"{len(rows)} rows, crc32 {zlib.crc32(content):08x}"

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return f"{self._path}, row {index}"

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


class _DatasetRows(DataRows):
    """Columns are typed, so keys that a row lacks come as None, and are removed."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        sample = [
            self[place] for place in sorted({0, len(dataset) // 2, len(dataset) - 1}) if 0 <= place < len(dataset)
        ]
        checksum = zlib.crc32(json.dumps(sample, default=str, sort_keys=True).encode())
        self.identity = f"{len(dataset)} rows, crc32 of three {checksum:08x}"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return _without_absent(self._dataset[int(index)])


def open_parts(config: DataConfig) -> dict[str, DataRows]:
    """The rows of each part by its name: the subset, the split, or both. Raises DataError for data that is missing,
    unreadable or empty."""
    parts = config.parts()
    subsets, splits = {subset for subset, _ in parts}, {split for _, split in parts}
    path = Path(config.name)
    saved, saved_splits = ((path / name).is_file() for name in SAVED)
    whole = path.is_file() or saved
    if (whole and len(parts) > 1) or ((whole or saved_splits) and subsets != {None}):
        raise DataError(
            f"data.name {config.name!r} has no subsets{' or splits' if whole else ''} to choose or to mix; name a"
            " folder with SPLIT.jsonl, or SUBSET/SPLIT.jsonl, for each part"
        )
    if whole and splits != {"train"}:
        logger.warning("{}: has no splits, so {!r} has all its rows", config.name, *splits)
    opened: dict[str, DataRows] = {}
    for subset, split in parts:
        if len(subsets) == len(parts) and subset is not None:
            name = subset
        else:
            name = split if len(splits) == len(parts) else f"{subset}-{split}"
        opened[name] = rows = _open(config.name, subset, split)
        if not len(rows):
            raise DataError(f"data.name {config.name!r} holds no rows{f' in {name}' if len(parts) > 1 else ''}")
    return opened


def _open(name: str, subset: str | None, split: str) -> DataRows:
    path = Path(name)
    if path.suffix in (".jsonl", ".json"):
        if not path.is_file():
            raise DataError(f"data.name {name!r}: there is no such file")
        return _json(path)
    if path.suffix == ".parquet" and not path.is_file():
        raise DataError(f"data.name {name!r}: there is no such file")
    if path.is_file() and path.suffix != ".parquet":
        raise DataError(f"data.name {name!r}: a file of rows is .jsonl, .json or .parquet; write it as one of them")
    if path.is_dir():
        for file in (path / (subset or "") / f"{split}{suffix}" for suffix in (".jsonl", ".json")):
            if file.is_file():
                return _json(file)
    return _dataset(name, subset, split)


def _json(path: Path) -> DataRows:
    if path.suffix == ".json":
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            is_list = file.read(4096).lstrip()[:1] == "["
        if is_list:
            return _JsonList(path)
    return JsonLines(path)


def _object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with columns, got {type(row).__name__}")
    return row


def _dataset(name: str, subset: str | None, split: str) -> DataRows:
    try:
        import datasets  # only needed for parquet files, folders and the hub
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"data.name {name!r} needs the datasets package: pip install 'meshrl[trainer]', or use a .jsonl file"
        ) from error
    datasets.disable_progress_bars()
    path = Path(name)
    try:
        if path.is_dir() and any((path / saved).is_file() for saved in SAVED):
            found = datasets.load_from_disk(name)
            loaded = found[split] if isinstance(found, datasets.DatasetDict) else found
        elif path.suffix == ".parquet":
            if not pq.read_metadata(name).num_rows:  # of which datasets makes batches of size 0, an error
                raise DataError(f"data.name {name!r} holds no rows")
            loaded = datasets.load_dataset("parquet", data_files=name, split="train")
        else:
            give_up_on_silence()
            loaded = datasets.load_dataset(name, subset, split=split)
    except KeyError as error:
        raise DataError(
            f"data.name {name!r} has no split {split!r}, but {', '.join(found)}; set data.split to one of them"
        ) from error
    # Files that are missing or broken, names that the hub does not know, and a hub that does not answer.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, NO_ANSWER) as error:
        part = f"split {split!r}" + (f" of subset {subset!r}" if subset else "")
        kind = "folder" if path.is_dir() else "file" if path.is_file() else "name on the hub (no such folder here)"
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        why = str(cause or error) if path.exists() else f"{told(error)}; {ADVICE}"
        raise DataError(f"cannot load data.name {name!r}, taken as a {kind}, {part}: {why}") from error
    return _DatasetRows(loaded)


def _without_absent(value: object) -> object:
    """A message's content may be None itself."""
    if isinstance(value, Mapping):
        return {key: _without_absent(each) for key, each in value.items() if each is not None or key == "content"}
    if isinstance(value, list):
        return [_without_absent(each) for each in value]
    return value


def every_row(parts: Mapping[str, DataRows]) -> Iterator[tuple[int, int]]:
    return ((part, row) for part, rows in enumerate(parts.values()) for row in range(len(rows)))


def row_name(rows: DataRows, part: str, row: int, *, mixed: bool) -> str:
    return f"{rows.where(row)} of {part}" if mixed else rows.where(row)
