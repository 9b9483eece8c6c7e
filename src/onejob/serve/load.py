"""What a replica is told to serve, made into models that have answered and services that count and record."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onejob.core.artifact import Json, digest_file
from onejob.core.faults import reach
from onejob.core.plugin import load
from onejob.core.traffic import SEGMENT_SUFFIX
from onejob.errors import DamagedError
from onejob.machines.inventory import threads_of
from onejob.serve.capture import Capture, Rules, Signature
from onejob.serve.folder import SHADOW
from onejob.serve.identify import Roles
from onejob.serve.journal import RequestLog
from onejob.serve.labels import LabelLog
from onejob.serve.model import ServedModel, open_served
from onejob.serve.policy import Fit, Limits
from onejob.serve.service import Identity, Recorders, Service
from onejob.serve.spool import Spool

WARM_UPS = 3
SLOW_NS = 100_000_000
"""Where a batch takes so long, larger ones aren't worth the wait."""


@dataclass(frozen=True)
class Options:
    """One version of what is served."""

    folder: Path
    desired: Mapping[str, Json]

    @property
    def limits(self) -> Limits:
        options = self.desired.get("options", {})
        batch = options.get("batch", {})
        return Limits(
            rows=int(batch.get("max", 64)),
            wait_ns=int(float(batch.get("wait_ms", 2.0)) * 1e6),
            queue=int(options.get("queue", 1024)),
            timeout_ns=int(float(options.get("timeout") or 30.0) * 1e9),
            goal_ns=int(float(batch.get("latency_ms") or 0.0) * 1e6),
        )

    @property
    def threads(self) -> int:
        """Threads of the engine: as told, else the replica's share of the cores that this process may use."""
        told = self.desired.get("options", {}).get("threads")
        return int(told) if told else threads_of(self.replicas)

    @property
    def replicas(self) -> int:
        return max(1, int(self.desired.get("options", {}).get("replicas", 1)))

    @property
    def grace(self) -> float:
        return float(self.desired.get("options", {}).get("grace", 10.0))


@dataclass(frozen=True)
class Told:
    """What the host tells a replica: what to serve, or what to try beside what serves."""

    folder: Path
    desired: Mapping[str, Json]
    former: Mapping[str, Json] | None
    """What goes on serving while `desired` is tried."""
    share: float
    shadow: bool

    @property
    def models(self) -> list[Mapping[str, Json]]:
        """What to serve, one for each model and version: as `desired.json` would have it if it were the only one."""
        if "models" not in self.desired:
            return [self.desired]
        return [one_model(self.desired, model) for model in self.desired["models"]]

    @classmethod
    def of(cls, message: Mapping[str, Json]) -> Told:
        trial = message.get("trial") or {}
        share, shadow = float(trial.get("share", 0.0)), bool(trial.get("shadow", False))
        return cls(Path(message["folder"]), message["desired"], trial.get("former"), share, shadow)


def one_model(desired: Mapping[str, Json], model: Mapping[str, Json]) -> dict[str, Json]:
    """One model of a repository, as `desired.json` would have it if it were the only one."""
    options = {**desired.get("options", {}), **(model.get("options") or {})}
    told = {name: value for name, value in desired.items() if name != "models"}
    return {**told, "name": model["name"], "version": model["version"], "engine": model["engine"], "options": options}


class Opened:
    """A model that has answered its warm-up, and what it records."""

    def __init__(self, options: Options, model: ServedModel, fit: Fit, *, shadow: bool) -> None:
        self.options = options
        self._model = model
        self._fit = fit
        self._recorders = open_recorders(options, model)
        self._aside = open_recorders(options, model, shadow=True) if shadow else None
        """Where copies' answers go; they never come among what was answered."""
        self._running: list[Capture | LabelLog] = []

    def service(self, log: RequestLog, metrics: Path, process: str) -> Service:
        """The service that answers with it; needs the event loop."""
        desired, engine = self.options.desired, self.options.desired["engine"]
        identity = Identity(
            name=desired["name"],
            digest=engine["digest"],
            generation=int(desired.get("generation", 0)),
            meta=engine.get("meta", {}),
            execution=engine.get("execution"),
            process=process,
            version=str(desired.get("version", "1")),
        )
        recorders = self._recorders if self._aside is None else self._aside
        made = Service(self._model, identity, self.options.limits, log, metrics, fit=self._fit, recorders=recorders)
        made.shadow = self._aside is not None
        return made

    @property
    def name(self) -> str:
        return str(self.options.desired["name"])

    def close(self) -> None:
        """Free a model that nobody has asked."""
        self._model.close()

    def start(self) -> None:
        self._start(self._recorders.capture, self._recorders.labels)

    def start_trial(self) -> None:
        """Record what it answers; labels are the serving one's to take."""
        self._start((self._aside or self._recorders).capture)

    def begin_to_serve(self, service: Service) -> None:
        """After a trial: record all, as an engine does that serves."""
        if self._aside is not None:
            self.stop()
            self._start(self._recorders.capture)
        self._start(self._recorders.labels)
        service.record(self._recorders)

    def stop(self) -> None:
        """Write and seal the rest."""
        for recorder in self._running:
            recorder.stop()
        self._running = []

    def _start(self, *recorders: Capture | LabelLog | None) -> None:
        for recorder in recorders:
            if recorder is not None:
                recorder.start()
                self._running.append(recorder)


def open_all(folder: Path, desired: Mapping[str, Json], *, shadow: bool = False) -> Opened:
    """Open the model and what it records, and warm it up."""
    options = Options(folder, desired)
    model, fit = open_warm(options)
    return Opened(options, model, fit, shadow=shadow)


def open_warm(options: Options) -> tuple[ServedModel, Fit]:
    """The model, after warm-up inferences of one row and of larger and larger batches; and how long these take."""
    engine = options.desired["engine"]
    project = options.desired.get("project")
    if project and str(project) not in sys.path:
        sys.path.insert(0, str(project))  # a family of the user's own lives there
    meta = engine.get("meta", {})
    if options.desired.get("options", {}).get("engine") == "triton":
        meta = load("onejob.engines.triton.engine:through")(meta)
    check_files(engine)
    model = open_served(Path(engine["dir"]), meta, threads=options.threads)
    reach("replica.before_warm_up")
    fit, most = Fit(), options.limits.rows if model.batchable else 1
    for rows in (*(2**power for power in range(most.bit_length()) if 2**power < most), most):
        if not model.warm_up(rows):  # the first of a size is slow: what it needs is set up then
            break
        took = 0
        for _ in range(WARM_UPS):
            begun = time.perf_counter_ns()
            model.warm_up(rows)
            took = time.perf_counter_ns() - begun
            fit.add(rows, took)
        if took > SLOW_NS:
            break  # larger ones will be measured when they come
    return model, fit


def check_files(engine: Mapping[str, Json]) -> None:
    """DamagedError if a file of the engine isn't the one that its digest stands for: answers name that."""
    files: Mapping[str, str] = engine.get("files") or {}
    for name, digest in files.items():
        path = Path(engine["dir"]) / name
        if not path.is_file() or digest_file(path) != digest:
            told = f"it is not the file of engine {engine['digest'][:12]} any more: somebody has changed it"
            raise DamagedError(told, place=str(path), cure="Serve it again: its files are laid out anew.")


def open_recorders(options: Options, model: ServedModel, *, shadow: bool = False) -> Recorders:
    """Capture and labels as [monitor] has them; nothing without it. Copies' answers are captured apart, and marked."""
    monitor: Mapping[str, Json] = options.desired.get("options", {}).get("monitor") or {}
    if not monitor:
        return Recorders()
    engine, rules = options.desired["engine"], Rules.of(monitor.get("capture") or {})
    roles = Roles.of(engine.get("meta", {}))
    signature = Signature(model.inputs, model.outputs, model.batchable, roles)
    meta = {"endpoint": options.desired["name"], "engine": engine["digest"], **({"shadow": True} if shadow else {})}
    spool = Spool(options.folder / SHADOW, SEGMENT_SUFFIX) if shadow else None
    capture = Capture(options.folder, meta, signature, rules, spool=spool) if rules.rate > 0 else None
    if shadow:
        return Recorders(capture)
    return Recorders(capture, LabelLog(options.folder, roles, model.check_labels, private=rules.private, age=rules.age))
