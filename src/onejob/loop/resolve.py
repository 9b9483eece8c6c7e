"""From what a person types to what it names: a run, a step, a ref, an artifact, an endpoint, a request, a job file."""

from __future__ import annotations

import difflib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.records import Endpoint, Execution, Ref, Run, StepRow
from onejob.errors import NotFoundError, UsageError
from onejob.loop.session import Session
from onejob.monitor.requests import find_request

MADE_ID = re.compile(r"[0-9a-f]{26}")
"""An id that a replica made; one that the caller gave may look like anything."""
LOOKS, MOMENT = 6, 0.2
"""A replica writes its request log a few times a second."""


@dataclass(frozen=True)
class Target:
    """What a name stands for; `kind` says which of the fields is set."""

    kind: str
    """`run`, `step`, `artifact`, `execution`, `endpoint`, `request` or `job`."""
    run: Run | None = None
    step: StepRow | None = None
    digest: str = ""
    ref: Ref | None = None
    execution: Execution | None = None
    endpoint: Endpoint | None = None
    request: Json = None
    path: Path | None = None

    @property
    def noun(self) -> str:
        """`a run`, `an endpoint`: for sentences."""
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"


def resolve(session: Session, name: str) -> Target:
    """The one thing that `name` stands for; NotFoundError with the nearest known names."""
    if not name:
        raise UsageError("the name is empty", cure="Name a run, a step, a ref, a digest, an endpoint or a job file.")
    for look in (_job_file, _run, _step, _ref, _endpoint, _execution, _artifact, _request, _job_folder):
        if found := look(session, name):
            return found
    near = difflib.get_close_matches(name, _names(session), 3)
    cure = f"Did you mean {' or '.join(near)}?" if near else "`onejob ps -a` lists runs and endpoints."
    raise NotFoundError(f"nothing is called {name!r}", cure=cure)


def _job_file(session: Session, name: str) -> Target | None:
    path = Path(name)
    return Target("job", path=path) if path.suffix == ".toml" else None


def _job_folder(session: Session, name: str) -> Target | None:
    """Last of all: `flights` is rather the endpoint than the folder beside it; `./flights` is the folder."""
    path = Path(name) / "job.toml"
    return Target("job", path=path) if path.is_file() else None


def _run(session: Session, name: str) -> Target | None:
    return Target("run", run=session.ledger.get_run(int(name))) if re.fullmatch(r"\d{1,6}", name) else None


def _step(session: Session, name: str) -> Target | None:
    match = re.fullmatch(r"(\d{1,6})/([\w.-]+)", name)
    if not match:
        return None
    run = session.ledger.get_run(int(match[1]))
    rows = session.ledger.list_steps(run.id)
    for row in rows:
        if row.name == match[2]:
            return Target("step", run=run, step=row)
    raise NotFoundError(f"run {run.id} has no step {match[2]!r}", cure=f"Steps: {', '.join(r.name for r in rows)}.")


def _ref(session: Session, name: str) -> Target | None:
    ref = session.ledger.get_ref(name) or (session.ledger.get_ref(f"{name}@latest") if "/" in name else None)
    return Target("artifact", digest=ref.digest, ref=ref) if ref else None


def _endpoint(session: Session, name: str) -> Target | None:
    endpoint = session.ledger.get_endpoint(name)
    return Target("endpoint", endpoint=endpoint) if endpoint else None


def _execution(session: Session, name: str) -> Target | None:
    if not re.fullmatch(r"[0-9a-f]{12}", name):
        return None
    try:
        return Target("execution", execution=session.ledger.get_execution(name))
    except NotFoundError:
        return None


def _artifact(session: Session, name: str) -> Target | None:
    if not re.fullmatch(r"[0-9a-f]{6,64}", name):
        return None
    try:
        return Target("artifact", digest=session.ledger.get_artifact(name).digest)
    except NotFoundError:
        return None


def _request(session: Session, name: str) -> Target | None:
    """A request that was answered; one that has only just been is in its log within a moment, so that is waited for."""
    tries = LOOKS if MADE_ID.fullmatch(name) else 1
    for number in range(tries):
        if number:
            time.sleep(MOMENT)
        for endpoint in session.ledger.list_endpoints():
            if record := find_request(session.home.endpoint(endpoint.name), name):
                return Target("request", endpoint=endpoint, request=record)
    return None


def _names(session: Session) -> list[str]:
    refs = [ref.name for ref in session.ledger.list_refs()]
    return refs + [endpoint.name for endpoint in session.ledger.list_endpoints()]
