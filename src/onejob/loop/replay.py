"""Replays rows of known outcome as traffic: asked over HTTP in the order of their event times, labels a while later.

What a demo or a bench needs to play months in minutes. The rows are a dataset that the job's own steps have made; the
label is kept apart and is never among what is asked. One connection, large requests in KServe's v2 protocol.
"""

from __future__ import annotations

import http.client
import json
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from onejob.core.artifact import Json
from onejob.core.job import Job
from onejob.core.spec import Duration, Model
from onejob.core.traffic import SECOND
from onejob.data.spec import Spec as Data
from onejob.errors import ConflictError, DataError, JobFileError, NotFoundError

Array = NDArray[Any]

RULES = "year.toml"
REQUEST_ROWS = 1000
LABEL_ROWS = 20_000
"""Labels in one message: they are durable when it is answered, so a few large ones spare the disk."""
TIMEOUT = 120.0


class Rules(Model):
    """`year.toml` of an example: which rows are played."""

    step: str
    options: dict[str, Json]
    delay: Duration = 86_400.0


@dataclass(frozen=True)
class Rows:
    """What will be asked, in the order of event time, and what it will turn out to be."""

    columns: Mapping[str, Array]
    """The model's inputs: numbers with NaN, or objects with None."""
    time: Array
    """Seconds since 1970."""
    key: Array
    label: Array

    def __len__(self) -> int:
        return len(self.time)

    def take(self, rows: Array | slice) -> Rows:
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Rows(columns, self.time[rows], self.key[rows], self.label[rows])


@dataclass
class Answers:
    """What came back: the chance of each row (NaN where a request failed), and how the asking went."""

    chance: Array
    failed: int = 0
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    """The first words of what went wrong, a few."""
    last_id: str = ""
    engines: dict[str, int] = field(default_factory=dict)
    """Engine's digest -> rows that it answered."""


def read_rules(folder: Path) -> Rules:
    """The rules of a folder; JobFileError with each mistake."""
    path = folder / RULES
    try:
        return Rules.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise NotFoundError("there is no year to play", place=str(path), cure="Play one of the examples.") from error
    except tomllib.TOMLDecodeError as error:
        raise JobFileError([f"{path}: is not TOML: {error}"]) from error
    except ValidationError as error:
        raise JobFileError([f"{path} {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]) from error


def replay_job(job: Job, rules: Rules) -> Job:
    """The job's own [data] for the rows that are played: other options of one step, no split, nothing held out."""
    spec = job.stages.get("data")
    assert isinstance(spec, Data)
    if not any(step.name == rules.step for step in spec.steps):
        known = ", ".join(step.name for step in spec.steps)
        raise JobFileError(
            [f"{job.path} [data] steps: the year changes the step {rules.step!r}, which isn't there: {known}"]
        )
    steps = [
        step.model_copy(update={"options": {**step.options, **rules.options}}) if step.name == rules.step else step
        for step in spec.steps
        if step.name != "split"
    ]
    expect = spec.expect.model_copy(update={"rows_min": None, "rows_max": None, "holdout_min": None})
    data = spec.model_copy(update={"steps": steps, "expect": expect})
    return replace(job, name=f"{job.name}-replay", stages={"data": data})


def rows_of(columns: Mapping[str, Array], roles: Mapping[str, Json]) -> Rows:
    """Columns of a dataset as rows to ask, sorted by event time; equal times stay in the dataset's order."""
    time, key, label = (roles.get(name) for name in ("time", "id", "label"))
    if time is None or key is None or label is None or columns[time].dtype.kind != "M":
        raise DataError(
            "only rows with a time and a key can be replayed, so that their labels find them",
            place="[data.columns]",
            cure="Name the columns: time = '…', id = '…'.",
        )
    moments = columns[time].astype("datetime64[us]").astype(np.int64) / SECOND
    order = np.argsort(moments, kind="stable")
    inputs = [*roles["categories"], *roles["numbers"]]
    return Rows(
        {name: columns[name][order] for name in inputs}, moments[order], columns[key][order], columns[label][order]
    )


class Asker:
    """A client of one endpoint: asks, and tells labels. Ends with `close`."""

    def __init__(self, url: str, model: str, roles: Mapping[str, Json]) -> None:
        place = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT)
        self._model = model
        self._roles = roles

    def ask(self, rows: Rows, size: int = REQUEST_ROWS) -> Answers:
        """Ask every row, `size` in one request; a request that fails is counted, and not sent again."""
        told = Answers(np.full(len(rows), np.nan))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            told.requests += 1
            try:
                answer, head = self._post(f"/v2/models/{self._model}/infer", self._request(rows.take(part)))
                told.chance[part] = next(o["data"] for o in answer["outputs"] if o["name"] == "probability")
            except (OSError, http.client.HTTPException, ValueError, StopIteration, ConflictError) as error:
                told.failed += 1
                told.errors = [*told.errors, f"{type(error).__name__}: {error}"][:3]
                self._connection.close()  # the next request opens it anew
                continue
            told.last_id = head.get("x-request-id", "")
            engine = head.get("x-onejob-engine", "")
            told.engines[engine] = told.engines.get(engine, 0) + len(rows.time[part])
        return told

    def tell(self, rows: Rows, delay: float) -> int:
        """Tell the labels, each with the time at which it became known; gives how many were accepted."""
        label, accepted = self._roles["label"], 0
        for start in range(0, len(rows), LABEL_ROWS):
            part = rows.take(slice(start, start + LABEL_ROWS))
            told = zip(part.key.tolist(), part.label.tolist(), (part.time + delay).tolist(), strict=True)
            labels = [{self._roles["id"]: key, label: value, "label_time": at} for key, value, at in told]
            answer, _ = self._post(f"/v1/models/{self._model}/labels", {"labels": labels})
            accepted += int(answer["accepted"])
        return accepted

    def close(self) -> None:
        self._connection.close()

    def _request(self, rows: Rows) -> Json:
        columns = {**rows.columns, self._roles["time"]: rows.time, self._roles["id"]: rows.key}
        inputs = [
            {
                "name": name,
                "datatype": "BYTES" if values.dtype == object else "FP64",
                "shape": [len(rows)],
                "data": plain(values),
            }
            for name, values in columns.items()
        ]
        return {"inputs": inputs}

    def _post(self, path: str, message: Json) -> tuple[Json, Mapping[str, str]]:
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = self._connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise ConflictError(f"{reply.status} {text[:200].decode(errors='replace')}", place=path)
        return json.loads(text), {name.lower(): value for name, value in reply.getheaders()}


def plain(values: Array) -> list[Json]:
    """Values as JSON has them: what isn't known is null."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [value if value == value else None for value in values.tolist()]
    found: list[Json] = values.tolist()
    return found


def known_by(rows: Rows, now: float, delay: float, told: int) -> slice:
    """The rows whose labels are known at a moment of event time and weren't told yet; `told` is how many were."""
    return slice(told, int(np.searchsorted(rows.time, now - delay, side="right")))


def by_month(time: Array, months: Sequence[str]) -> Iterator[tuple[str, slice]]:
    """The months of rows in the order of time, each with where its rows lie; `months` has each row's."""
    names = np.asarray(months)
    begins = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), len(names)]
    for start, end in pairwise(begins):
        if end > start:
            yield str(names[start]), slice(start, end)
