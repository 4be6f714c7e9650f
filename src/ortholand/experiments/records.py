"""Records of runs: what was asked, what came out, on which machine. One JSON file each.

A file is written beside its place and moved there in one step, and carries a checksum of its
content. So a run that is killed leaves whole records or none, and a damaged one is never used.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1


@dataclass(frozen=True)
class Options:
    """What the user chooses for a run of an experiment, and the data that was found for it."""

    preset: str
    seed: int
    device: str
    threads: int
    data: str = ""  # identity of the data set; records from before there were any lack it


@dataclass(frozen=True)
class Request:
    """Everything the numbers of one unit of work depend on: its record's identity."""

    experiment: str
    revision: int
    unit: str
    options: Options
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """Numbers of one unit of work: series of equal length, and single values."""

    series: Mapping[str, Sequence[float]]
    values: Mapping[str, float]


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


class MissingRecordError(Exception):
    """A record that a claim or a figure needs and that is not there."""


class Records(Mapping[str, Record]):
    """Records of one run of an experiment, by unit."""

    def __init__(self, records: Mapping[str, Record]) -> None:
        self._records = dict(records)

    def __getitem__(self, unit: str) -> Record:
        # Not a KeyError: that would also hide mistakes in the claims themselves.
        if unit not in self._records:
            raise MissingRecordError(f"the run {unit} is missing")
        return self._records[unit]

    def __contains__(self, unit: object) -> bool:
        return unit in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


class Found(NamedTuple):
    """What the store has for a request; without a record, ``reason`` says why."""

    record: Record | None
    reason: str = ""


@dataclass(frozen=True)
class Store:
    """The records in a folder: ``records/<experiment>/<preset>-seed<seed>/<unit>.json``."""

    root: Path

    def path(self, request: Request) -> Path:
        """Where the record of a request has its place."""
        options = request.options
        folder = f"{options.preset}-seed{options.seed}"
        return self.root / "records" / request.experiment / folder / f"{request.unit}.json"

    def save(self, record: Record) -> None:
        """Save a record, whole or not at all."""
        path = self.path(record.request)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode(record).encode())

    def find(self, request: Request, *, any_versions: bool = False) -> Found:
        """The record that answers exactly this request, if need be with other versions."""
        path = self.path(request)
        if not path.exists():
            return Found(None, "not run yet")
        try:
            record = load(path)
        except DamagedRecordError as damage:
            return Found(None, f"damaged record: {damage}")
        made_for = record.request
        if made_for.versions != request.versions and not any_versions:
            return Found(None, "made with other versions")
        if _as_json(replace(made_for, versions={})) != _as_json(replace(request, versions={})):
            return Found(None, "made with other settings")
        return Found(record)

    def last_options(self, experiment: str) -> list[Options]:
        """The options of the last run in each folder of an experiment that has a whole record."""
        folders = sorted((self.root / "records" / experiment).glob("*/"))
        last = [max(records, key=lambda r: r.finished) for f in folders if (records := _whole(f))]
        return [record.request.options for record in last]


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
        DamagedRecordError: if it is not exactly what was once written.
    """
    try:
        whole = json.loads(path.read_bytes().decode())
        content = whole["content"]
        if _checksum(_canonical(content)) != whole["checksum"]:
            raise DamagedRecordError("the checksum does not match")
        if content["format"] != FORMAT:
            raise DamagedRecordError(f"format {content['format']}, expected {FORMAT}")
        return _decode(content)
    except OSError as error:
        raise DamagedRecordError(f"unreadable ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedRecordError("cut off or not a record") from error


def _decode(content: dict[str, Any]) -> Record:
    request = dict(content["request"])
    request["options"] = Options(**request["options"])
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


def _whole(folder: Path) -> list[Record]:
    """The undamaged records in a folder."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(load(path))
        except DamagedRecordError:
            continue
    return records
