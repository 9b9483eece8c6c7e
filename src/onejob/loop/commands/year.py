"""The command that plays an example's year: traffic goes through the endpoint, and the loop does what its rules say.

Nothing of the loop is pretended: the flights are asked over HTTP, captured and sealed; their labels come late by
HTTP; watching, retraining, the gate and promotion are the ones of `onejob up`. Only the clock is quick: a month of
events is asked at once, and the loop looks at the end of each month.
"""

from __future__ import annotations

import datetime
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.artifact import Json, short
from onejob.core.context import InputArtifact
from onejob.core.job import Job
from onejob.core.plugin import load
from onejob.core.records import Decision, Endpoint
from onejob.core.state import EndpointState
from onejob.errors import ConflictError, UnavailableError, UsageError
from onejob.loop.champion import dataset_of, event_now
from onejob.loop.closing import RETRAIN, WATCHED, asked, close, scene_of
from onejob.loop.commands.run import QUICK, SLOW, load_job, run_job
from onejob.loop.endpoints import tend_endpoint
from onejob.loop.reconcile import reconcile
from onejob.loop.replay import (
    RULES,
    Answers,
    Array,
    Asker,
    Rows,
    Rules,
    by_month,
    known_by,
    read_rules,
    replay_job,
    rows_of,
)
from onejob.loop.session import Session
from onejob.loop.snapshots import run_view
from onejob.loop.story import story
from onejob.loop.tasks import lay_out
from onejob.loop.traffic import seal_traffic
from onejob.loop.views import RunView, StoryLine
from onejob.loop.year import (
    CONSTANT,
    POLICIES,
    Figures,
    Month,
    Year,
    constant_forecast,
    drawing,
    figures,
    months_of,
    verdict_of,
)
from onejob.monitor.collect import counted
from onejob.monitor.spec import DAY
from onejob.monitor.spec import Spec as Monitor

FOLDER = "year"
"""Below the example's folder: the figures and the plot."""
SEALS = ("monitor.capture.age=1s",)
"""While a year is played in minutes, nobody waits a minute for a file to be sealed."""
PATIENCE = 60.0
"""Seconds to wait for what was answered to be sealed; what is missing then was dropped."""

OnMonth = Callable[[Month], None]
OnView = Callable[[RunView], None]


@dataclass(frozen=True)
class YearView:
    """A year that was played."""

    endpoint: str
    year: Year
    champion: str
    """Digest of what is served in the end."""
    lineage: tuple[str, ...]
    """From the champion back to the first dataset, a line each."""
    files: tuple[str, ...] = ()
    """The figures as JSON, and the plots."""
    note: str = ""
    """Why there is no plot, if so."""


@dataclass
class Played:
    """How far the year is."""

    told: int = 0
    """Rows whose labels were told."""
    captured: int = 0
    labels: int = 0
    chances: dict[str, list[Array]] = field(default_factory=lambda: {name: [] for name in (*POLICIES, CONSTANT)})
    failed: int = 0
    deployed: str = ""
    """What always deploying would serve."""
    said: set[StoryLine] = field(default_factory=set)
    turn: int = 0
    promotions: int = 0
    """What was told of already: lines of the story, the newest turn, and how many promotions."""


def has_year(folder: str | Path) -> bool:
    """Whether there is a year to play."""
    return (Path(folder) / RULES).is_file()


def play_year(
    session: Session, folder: str | Path, on_month: OnMonth | None = None, on_view: OnView | None = None
) -> YearView:
    """Play the year of the job in a folder, whose endpoint serves; gives figures, files and the champion's lineage."""
    started = time.monotonic()
    place = Path(folder)
    rules, job = read_rules(place), load_job(place)
    endpoint = _endpoint(session, job)
    rows = _rows(session, job, rules)
    months: list[Month] = []
    with _scorers(session) as scorers:
        game = _Game(session, job, rules, endpoint, rows, scorers)
        for name, part in by_month(rows.time, game.month_names):
            months.append(game.play(name, part, on_view))
            if on_month:
                on_month(months[-1])
    year = Year(tuple(months), game.played.failed, time.monotonic() - started)
    files, note = _write(place / FOLDER, year)
    champion = _ready(session, endpoint.name)
    return YearView(endpoint.name, year, champion.artifact, tuple(ancestry(session, champion)), files, note)


def _endpoint(session: Session, job: Job) -> Endpoint:
    """The job's endpoint, fit for a year: it is watched, and nobody has asked it yet."""
    if "serve" not in job.stages or "monitor" not in job.stages:
        raise UsageError("a year needs [serve] and [monitor]", place=str(job.path), cure="Add the tables.")
    name = getattr(job.stages["serve"], "name", None) or job.name
    endpoint = session.ledger.get_endpoint(name)
    if endpoint is None or endpoint.state is not EndpointState.READY:
        raise ConflictError(f"endpoint {name} is not ready", cure=f"`onejob run {job.path}` starts it.")
    if session.ledger.list_turns(name, limit=1):
        cure = "`onejob why` tells what happened; another --home plays a year of its own."
        raise ConflictError(f"a year was played with endpoint {name} before", place=str(session.home.root), cure=cure)
    return endpoint


def _rows(session: Session, job: Job, rules: Rules) -> Rows:
    """The rows of the year, made by the job's own steps; found in the cache the second time."""
    run_job(session, replay_job(job, rules))
    ref = session.ledger.get_ref(f"{job.name}-replay/dataset@latest")
    assert ref is not None
    columns, roles = _split(session, ref.digest, ("categories", "numbers", "label", "time", "id"))
    return rows_of(columns, roles)


def _split(session: Session, digest: str, roles: tuple[str, ...]) -> tuple[dict[str, Array], dict[str, Json]]:
    """Columns of a dataset's training split, by their roles."""
    artifact = session.ledger.get_artifact(digest)
    known: dict[str, Json] = artifact.meta["columns"]
    names = [name for role in roles for name in (known[role] if isinstance(known[role], list) else [known[role]])]
    read: Callable[..., dict[str, Array]] = load("onejob.engines.dataset:read_split")
    with tempfile.TemporaryDirectory(dir=session.home.tmp) as folder:
        lay_out(session, artifact, Path(folder))
        return read(Path(folder), artifact.meta, "train", [name for name in names if name]), known


# ---- a month -----------------------------------------------------------------------------------------------------


class _Game:
    """The year under way: asks a month, tells the labels that are known by its end, lets the loop look, scores."""

    def __init__(
        self, session: Session, job: Job, rules: Rules, endpoint: Endpoint, rows: Rows, scorer: Callable[[str], Any]
    ) -> None:
        self.session, self.rules, self.name, self.rows, self.scorer = session, rules, endpoint.name, rows, scorer
        monitor = job.stages["monitor"]
        assert isinstance(monitor, Monitor)
        self.monitor = monitor
        self.played = Played(deployed=endpoint.artifact)
        self.first = endpoint.artifact
        meta = session.ledger.get_artifact(endpoint.artifact).meta
        self.roles: dict[str, Json] = meta["columns"]
        self.score: Callable[..., dict[str, float]] = load(f"{meta['family']}.metrics:score")
        zone = monitor.block.zone
        self.month_names = months_of(rows.time, zone)
        self.label = np.asarray(scorer(self.first).encoding.encode_label(rows.label), np.float64)
        prior = self._training_share()
        window = monitor.harm.reference_blocks * DAY
        self.constant = constant_forecast(rows.time, self.label, rules.delay, zone, prior, window)

    def _training_share(self) -> float:
        columns, roles = _split(self.session, dataset_of(self.session, self.first, None), ("label",))
        return float(np.mean(self.scorer(self.first).encoding.encode_label(columns[roles["label"]])))

    def play(self, month: str, part: slice, on_view: OnView | None) -> Month:
        rows, deployed = self.rows.take(part), self.played.deployed
        answers = self._ask(rows, self.rows.time[part.stop - 1])
        settle(self.session, self.name, on_view)
        lines, decisions, promoted = self._happened()
        chances = {
            "static": self.scorer(self.first).answer(rows.columns),
            "loop": answers.chance,
            "always": self.scorer(deployed).answer(rows.columns),
            CONSTANT: self.constant[part],
        }
        label, answered = self.label[part], np.isfinite(answers.chance)
        told: dict[str, Figures] = {
            name: figures(self.score, label, np.where(answered, chance, np.nan)) for name, chance in chances.items()
        }
        verdict = verdict_of([(d.verdict, d.reasons, d.outcome) for d in decisions])
        share = float(label[answered].mean()) if answered.any() else float("nan")
        return Month(month, int(answered.sum()), share, told, verdict, promoted, tuple(lines))

    def _ask(self, rows: Rows, now: float) -> Answers:
        """Traffic in its own order, then the labels that are known when the last of it has come."""
        played = self.played
        endpoint = _ready(self.session, self.name)
        asker = Asker(f"http://127.0.0.1:{endpoint.port}", self.name, self.roles)
        try:
            answers = asker.ask(rows)
            known = known_by(self.rows, now, self.rules.delay, played.told)
            played.labels += asker.tell(self.rows.take(known), self.rules.delay)
        finally:
            asker.close()
        played.told = known.stop
        played.failed += answers.failed
        played.captured += int(np.isfinite(answers.chance).sum())
        _await_sealed(self.session, self.name, played)
        _check_clock(self.session, self.name, now)
        return answers

    def _happened(self) -> tuple[list[str], list[Decision], bool]:
        """What is new in the endpoint's story since the last month; its decisions; whether an engine took over."""
        ledger, played = self.session.ledger, self.played
        lines: list[str] = []
        for line in story(self.session, self.name):
            if line not in played.said:
                played.said.add(line)
                lines += [
                    f"{line.kind}: {line.text}",
                    *(self._told_training(line.run) if line.kind == "run" and line.run else ()),
                ]
        turns = {turn.run: turn for turn in ledger.list_turns(self.name) if turn.run > played.turn}
        decisions = [decision for decision in reversed(ledger.list_decisions(self.name)) if decision.run in turns]
        for decision in decisions:
            if turns[decision.run].kind == RETRAIN:
                played.deployed = decision.challenger
        played.turn = max(turns, default=played.turn)
        promoted = len(ledger.list_promotions(self.name)) - played.promotions
        played.promotions += promoted
        return lines, decisions, promoted > 0

    def _told_training(self, run: int) -> Iterator[str]:
        for row in self.session.ledger.list_steps(run):
            if row.name == "data" and row.execution is not None:
                outputs = self.session.ledger.get_execution(row.execution).outputs
                if digest := outputs.get("dataset"):
                    yield f"run: run {run} trains on {told_rows(self.session.ledger.get_artifact(digest).meta)}"


def told_rows(meta: Mapping[str, Json]) -> str:
    """What a dataset trains on; of a retraining's, how much came back from the endpoint and how much it holds out."""
    rows = f"{meta['splits']['train']['rows']:,} rows"
    if not (extended := meta.get("extended")):
        return f"{rows} from the sources"
    held = meta["splits"].get("holdout", {}).get("rows", 0)
    captured = extended["captured_rows"]
    return f"{rows} ({captured:,} came back, of which the newest {held:,} are held out)"


# ---- the loop ----------------------------------------------------------------------------------------------------


def settle(session: Session, name: str, on_view: OnView | None = None) -> None:
    """Turn the loop of one endpoint until it has nothing more to do: as `onejob up` does, with or without one."""
    wait = QUICK
    while True:
        before = session.ledger.newest_event()
        seal_traffic(session, name)
        close(session, name)
        runs = [turn.run for turn in session.ledger.list_turns(name, taken=False)]
        reconcile(session, runs)
        tend_endpoint(session, name)
        if on_view:
            for run in runs:
                on_view(run_view(session, session.ledger.get_run(run)))
        if _is_quiet(session, name) and session.ledger.newest_event() == before:
            return
        wait = QUICK if session.ledger.newest_event() != before else min(SLOW, wait * 1.3)
        time.sleep(wait)


def _is_quiet(session: Session, name: str) -> bool:
    """Whether the newest block was watched, nothing goes on and nothing is due."""
    scene = scene_of(session, name)
    if scene is None or scene.endpoint.state not in (EndpointState.READY, EndpointState.FAILED):
        return False
    if session.ledger.list_turns(name, taken=False):
        return False
    watched = session.ledger.list_turns(name, kind=WATCHED, limit=1)
    return bool(watched) and watched[0].facts.get("until") == scene.until and not asked(session, scene).start


def _await_sealed(session: Session, name: str, played: Played) -> None:
    """Wait until what was answered and told lies sealed in the ledger; rows that capture dropped never come."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        seal_traffic(session, name)
        traffic, labels = (
            sum(s.rows for s in session.ledger.list_segments(name, kind=kind)) for kind in ("traffic", "labels")
        )
        dropped = sum(
            n for what, n in counted(session.home.endpoint(name)).items() if what.startswith("capture_dropped.")
        )
        if traffic + dropped >= played.captured and labels >= played.labels:
            return
        time.sleep(0.1)
    raise UnavailableError("what was answered was not recorded in time", place=f"endpoint {name}")


def _check_clock(session: Session, name: str, now: float) -> None:
    """A question that somebody else asked without saying when is of today, and the loop's clock goes by the newest."""
    newest = event_now(session, name)
    if newest is not None and newest > now + 1:
        date = datetime.datetime.fromtimestamp(newest, datetime.UTC).date().isoformat()
        cure = "Play it in another --home, and give the event's time with each question."
        raise ConflictError(f"it was asked about an event of {date}, later than what is played", place=name, cure=cure)


def _ready(session: Session, name: str) -> Endpoint:
    endpoint = session.ledger.get_endpoint(name)
    if endpoint is None or endpoint.state is not EndpointState.READY:
        raise ConflictError(f"endpoint {name} is not ready", cure=f"`onejob show {name}` says why.")
    return endpoint


@contextmanager
def _scorers(session: Session) -> Iterator[Callable[[str], Any]]:
    """Opens engines by digest, each once, with the engine that serving uses."""
    made: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(dir=session.home.tmp, prefix="year-"))

    def scorer(digest: str) -> Any:
        if digest not in made:
            artifact = session.ledger.get_artifact(digest)
            lay_out(session, artifact, folder / digest)
            given = InputArtifact(digest, artifact.kind, artifact.meta, folder / digest)
            made[digest] = load("onejob.monitor.engines.scoring:Scorer")(artifact.meta["family"], given, 1)
        return made[digest]

    try:
        yield scorer
    finally:
        for each in made.values():
            each.close()
        shutil.rmtree(folder, ignore_errors=True)


# ---- the end -----------------------------------------------------------------------------------------------------


def ancestry(session: Session, endpoint: Endpoint) -> Iterator[str]:
    """The champion, the run that made it and why, the rows that it learned from, and the first dataset."""
    made = session.ledger.get_execution(endpoint.execution) if endpoint.execution else None
    meta = session.ledger.get_artifact(endpoint.artifact).meta
    yield f"engine {short(endpoint.artifact)}: {meta.get('engine', 'pytorch')} {meta.get('precision', '')}".rstrip()
    if made is not None:
        cause = session.ledger.get_run(made.run).cause
        why = cause.get("reason") or f"asked for by {cause.get('user', 'a person')}"
        yield f"made by run {made.run}, because of {why}"
    digest = dataset_of(session, endpoint.artifact, endpoint.execution)
    about = session.ledger.get_artifact(digest).meta
    yield f"dataset {short(digest)}: trained on {told_rows(about)}"
    if extended := about.get("extended"):
        base = session.ledger.get_artifact(extended["base"]).meta
        yield f"its base {short(extended['base'])}: {told_rows(base)}"


def _write(folder: Path, year: Year) -> tuple[tuple[str, ...], str]:
    """`year.json` and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "year.json"
    target.write_text(json.dumps(year.to_json(), indent=2) + "\n")
    try:
        draw: Callable[..., list[Path]] = load("onejob.engines.plot:draw_months")
        plots = draw(folder / "year", **drawing(year))
    except UnavailableError as error:
        return (str(target),), f"no plot: {error}"
    return (str(target), *map(str, plots)), ""
