"""Records of runs: the request, the result and the machine. One JSON file each.

A file is written next to its place and moved there in one step, and carries a checksum of its
content. So a killed run leaves whole records or none, and a damaged one is never used.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 2  # of the files; records in another format are redone


@dataclass(frozen=True)
class RunOptions:
    """What the user chooses for a run of a study, and the data found for it."""

    preset: str
    seed: int
    device: str
    threads: int
    data: str = ""  # identity of the data set


@dataclass(frozen=True)
class Request:
    """Everything that the numbers of one unit of work depend on: its record's identity."""

    study: str
    revision: int
    unit: str
    options: RunOptions
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """Numbers of one unit of work: series of equal length, and single values."""

    series: Mapping[str, Sequence[float]]
    values: Mapping[str, float]

    @classmethod
    def of_rows(
        cls, names: Sequence[str], rows: Sequence[Sequence[float]], **values: float
    ) -> "Result":
        """The series with these names, from numbers recorded row by row."""
        return cls(dict(zip(names, zip(*rows, strict=True), strict=True)), values)


@dataclass(frozen=True)
class Record:
    """A result with its request and circumstances."""

    request: Request
    result: Result
    machine: Mapping[str, Any]
    seconds: float  # duration of the whole unit, measuring included
    finished: str  # UTC, ISO 8601

    @property
    def configuration(self) -> Mapping[str, Any]:
        """Configuration of the unit."""
        return self.request.configuration

    def series(self, name: str) -> Sequence[float]:
        """One of the result's series."""
        return self.result.series[name]

    def value(self, name: str) -> float:
        """One of the result's single values."""
        return self.result.values[name]


class DamagedRecordError(Exception):
    """A record file that cannot be trusted."""


class OldRecordError(Exception):
    """A record file in another format, of an earlier version."""


class MissingRecordError(Exception):
    """A record that a claim or a figure needs is missing."""


class Records(Mapping[str, Record]):
    """Records of one run of a study, by unit."""

    def __init__(self, records: Mapping[str, Record]) -> None:
        self._records = dict(records)

    def __getitem__(self, unit: str) -> Record:
        # Not a KeyError: that would also hide mistakes in the claims themselves.
        if unit not in self._records:
            raise MissingRecordError(f"the run {unit} is missing")
        return self._records[unit]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the whole run, from any record whose task has them."""
        for record in self._records.values():
            if "settings" in record.configuration:
                return record.configuration["settings"]
        raise MissingRecordError("nothing is recorded")

    def __contains__(self, unit: object) -> bool:
        return unit in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


NOT_RUN, DAMAGED = "not run yet", "damaged record"


class Found(NamedTuple):
    """What the store has for a request; without a record, ``reason`` says why."""

    record: Record | None
    reason: str = ""

    @property
    def damaged(self) -> bool:
        """Whether there is a file that cannot be trusted."""
        return self.reason.startswith(DAMAGED)


@dataclass(frozen=True)
class Store:
    """The records in a folder: ``records/<study>/<preset>-seed<seed>/<unit>.json``.

    Each file is read and checked once; while a store is in use, only it writes files.
    """

    root: Path
    _read: dict[Path, Found] = field(default_factory=dict, repr=False, compare=False)

    def path(self, request: Request) -> Path:
        """The path of a request's record."""
        options = request.options
        folder = f"{options.preset}-seed{options.seed}"
        return self.root / "records" / request.study / folder / f"{request.unit}.json"

    def save(self, record: Record) -> None:
        """Save a record, whole or not at all."""
        path = self.path(record.request)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode(record).encode())
        self._read.pop(path, None)  # always use what is on disk

    def read(self, path: Path) -> Found:
        """What a file holds, whatever the request."""
        if path not in self._read:
            self._read[path] = _read_file(path)
        return self._read[path]

    def find(self, request: Request, *, any_versions: bool = False) -> Found:
        """The record of exactly this request; with ``any_versions``, made by any versions."""
        found = self.read(self.path(request))
        if found.record is None:
            return found
        made_for = found.record.request
        if made_for.versions != request.versions and not any_versions:
            return Found(None, "made with other versions")
        if _as_json(replace(made_for, versions={})) != _as_json(replace(request, versions={})):
            return Found(None, "made with other settings")
        return found

    def last_options(self, study: str) -> list[RunOptions]:
        """The options of the last run in each of a study's folders that has a whole record."""
        folders = sorted((self.root / "records" / study).glob("*/"))
        found = [[self.read(path).record for path in sorted(f.glob("*.json"))] for f in folders]
        whole = [[record for record in records if record is not None] for records in found]
        last = [max(records, key=lambda r: r.finished) for records in whole if records]
        return [record.request.options for record in last]

    def damaged(self) -> dict[Path, str]:
        """Every record file of the folder that cannot be trusted, and what is wrong with it."""
        paths = sorted((self.root / "records").glob("*/*/*.json"))
        found = {path: self.read(path) for path in paths}
        return {path: f.reason for path, f in found.items() if f.damaged}


def _read_file(path: Path) -> Found:
    if not path.exists():
        return Found(None, NOT_RUN)
    try:
        return Found(load(path))
    except OldRecordError as old:
        return Found(None, str(old))
    except DamagedRecordError as damage:
        return Found(None, f"{DAMAGED}: {damage}")


def write_atomically(path: Path, data: bytes) -> None:
    """Put data at path so that at every moment the file is the old one or the new one."""
    # A fixed name: what a killed run leaves behind is overwritten when its unit is redone.
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def encode(record: Record) -> str:
    """The text of a record's file."""
    content = {
        "format": FORMAT,
        "request": asdict(record.request),
        "series": {
            name: [_to_json(v) for v in values] for name, values in record.result.series.items()
        },
        "values": {name: _to_json(v) for name, v in record.result.values.items()},
        "machine": dict(record.machine),
        "seconds": record.seconds,
        "finished": record.finished,
    }
    text = _canonical(content)
    return f'{{"checksum":"{_checksum(text)}","content":{text}}}\n'


def load(path: Path) -> Record:
    """Read a record's file.

    Raises:
        DamagedRecordError: if it is not exactly what was written.
        OldRecordError: if another version wrote it.
    """
    try:
        whole = json.loads(path.read_bytes().decode())
        content = whole["content"]
        if _checksum(_canonical(content)) != whole["checksum"]:
            raise DamagedRecordError("the checksum does not match")
        if content["format"] != FORMAT:
            raise OldRecordError(f"made by another version, format {content['format']}")
        return _decode(content)
    except OSError as error:
        raise DamagedRecordError(f"unreadable ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedRecordError("cut off or not a record") from error


def _decode(content: dict[str, Any]) -> Record:
    request = dict(content["request"])
    request["options"] = RunOptions(**request["options"])
    series = {name: [float(v) for v in values] for name, values in content["series"].items()}
    values = {name: float(v) for name, v in content["values"].items()}
    return Record(
        Request(**request),
        Result(series, values),
        content["machine"],
        content["seconds"],
        content["finished"],
    )


def _to_json(value: float) -> float | str:
    # JSON has no NaN and no infinity, and a run that explodes is a result too: float() reads these.
    return float(value) if math.isfinite(value) else str(float(value))


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(request: Request) -> str:
    return _canonical(asdict(request))
