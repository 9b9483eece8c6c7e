"""Commands that keep things: verify, gc, backup, restore."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from onejob.core.artifact import short
from onejob.core.faults import reach
from onejob.core.state import RunState
from onejob.core.traffic import CAPTURE, LABELS, OPEN, SEALED, SECRET
from onejob.errors import NotFoundError
from onejob.loop.endpoints import served_digest
from onejob.loop.executions import LIVE
from onejob.loop.home import Home
from onejob.loop.resolve import resolve
from onejob.loop.session import Session
from onejob.loop.views import BackupView, Damage, GcView, VerifyView
from onejob.serve.labels import ORDER
from onejob.store.backup import Saved
from onejob.store.backup import backup as write_backup
from onejob.store.backup import restore as read_backup
from onejob.store.collect import GRACE, KEEP_RUNS, GcPlan, plan_gc, sweep
from onejob.store.verify import DAMAGE, verify_lineage

SHOWN = 20

CURES = {
    "damaged": "`onejob run JOB --force` makes it anew; a backup has it too.",
    "missing": "`onejob run JOB` makes it anew; a backup has it too.",
    "source changed": "It was changed after it was read: the next run reads it anew.",
    "source gone": "Nothing made from it is damaged, but it can't be made anew.",
}
"""What `verify` finds -> what helps."""


def verify(session: Session, ref: str) -> VerifyView:
    """Hash a whole lineage again, from what `ref` names down to the source files, and name what isn't as it was."""
    artifacts: set[str] = set()
    files = size = 0
    damaged: dict[tuple[str, str], Damage] = {}
    for digest in _digests(session, ref):
        report = verify_lineage(session.ledger, session.blobs, digest)
        artifacts |= {link.artifact for link in report.lineage}
        files, size = files + report.files, size + report.size
        for found in report.findings:
            damaged[found.artifact, found.path] = Damage(
                artifact=found.artifact,
                kind=found.kind,
                path=found.path,
                problem=found.what,
                where=found.place,
                cure=CURES[found.what],
            )
    found_all = tuple(damaged.values())
    return VerifyView(
        ref,
        len(artifacts),
        files,
        size,
        damaged=tuple(d for d in found_all if d.problem in DAMAGE),
        changed=tuple(d for d in found_all if d.problem not in DAMAGE),
    )


def _digests(session: Session, ref: str) -> list[str]:
    """The artifacts that a name stands for: one, or all that a run or step has left."""
    target = resolve(session, ref)
    if target.digest:
        return [target.digest]
    if target.endpoint:
        return [target.request["digest"] if target.request else target.endpoint.artifact]
    if target.execution:
        return list(target.execution.outputs.values())
    run = target.run
    if run is None:
        job = resolve_job(session, target.path)
        run = session.ledger.get_run(job)
    rows = [target.step] if target.step else session.ledger.list_steps(run.id)
    made = [session.ledger.get_execution(row.execution) for row in rows if row.execution]
    found = list(dict.fromkeys(digest for e in made for digest in e.outputs.values()))
    if not found:
        raise NotFoundError("it has left no artifact", place=ref)
    return found


def resolve_job(session: Session, path: Path | None) -> int:
    """The number of the newest run of the job that a file describes."""
    assert path is not None
    runs = [run for run in session.ledger.list_runs() if Path(run.project) == path.resolve().parent]
    if not runs:
        raise NotFoundError("this job has not run yet", place=str(path), cure=f"`onejob run {path}` runs it.")
    return runs[0].id


def gc(session: Session, dry_run: bool = False, *, grace: float = GRACE, keep_runs: int = KEEP_RUNS) -> GcView:
    """Free what nothing refers to any more: artifacts, blobs, and folders of work that has long ended."""
    now = session.clock()
    plan = plan_gc(session.ledger, session.blobs, now, grace, keep_runs)
    folders = list(_idle_folders(session, plan, now - grace))
    sizes = {folder: _size(folder) for folder in folders}
    in_use = sum(size for _, size, _ in session.blobs) - plan.size
    details = [f"{short(blob.digest)} {blob.reason}" for blob in plan.free[:SHOWN]]
    details += [f"{folder}: its work has ended" for folder in folders[:SHOWN]]
    if dry_run:
        freed = plan.size + sum(sizes.values())
        return GcView(True, len(plan.drop), len(plan.free), len(folders), freed, in_use, tuple(details))
    swept = sweep(session.ledger, session.blobs, plan)
    for folder in folders:
        reach("gc.before_folder")
        shutil.rmtree(folder, ignore_errors=True)
    freed = swept.size + sum(sizes.values())
    return GcView(False, len(swept.dropped), len(swept.freed), len(folders), freed, in_use, tuple(details))


def _idle_folders(session: Session, plan: GcPlan, before: float) -> Iterator[Path]:
    """Work folders that no kept run shows, scratch that no live execution uses, engines that are no longer served."""
    ledger, root = session.ledger, session.home.root
    executions = {e.id: e for e in ledger.list_executions()}
    live_keys = {e.key for e in executions.values() if e.state in LIVE}
    kept_runs = _kept_runs(session, plan.keep_runs)
    for folder in sorted((root / "work").glob("*")):
        known = executions.get(folder.name)
        idle = known is None or (known.state not in LIVE and known.run not in kept_runs)
        if idle and _untouched(folder, before):
            yield folder
    for folder in sorted((root / "scratch").glob("*")):
        if folder.name not in live_keys and _untouched(folder, before):
            yield folder
    for endpoint in ledger.list_endpoints():
        place = session.home.endpoint(endpoint.name)
        for folder in sorted((place / "engines").glob("*")):
            if folder.name not in (endpoint.artifact, served_digest(place)) and _untouched(folder, before):
                yield folder


def _kept_runs(session: Session, keep: int) -> set[int]:
    """Runs that go on, and the newest of each job."""
    kept: set[int] = set()
    counts: dict[tuple[str, str], int] = {}
    for run in session.ledger.list_runs():
        line = (run.job, run.cause.get("kind", ""))  # runs that the loop adds must not push out those of a person
        counts[line] = counts.get(line, 0) + 1
        if counts[line] <= keep or run.state in (RunState.QUEUED, RunState.RUNNING):
            kept.add(run.id)
    return kept


def _untouched(folder: Path, before: float) -> bool:
    try:
        return max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")]) < before
    except OSError:
        return False


def _size(folder: Path) -> int:
    """Bytes that only this folder holds; files shared with blobs by hard link are not freed with it."""
    total = 0
    for path in folder.rglob("*"):
        try:
            about = os.lstat(path)
        except OSError:
            continue
        total += about.st_size if about.st_nlink == 1 and path.is_file() else 0
    return total


def backup(session: Session, target: str | Path) -> BackupView:
    """One consistent tar file of the ledger, every blob that it names, and what endpoints hold that is in no blob yet.

    Runs and endpoints may go on meanwhile.
    """
    files = _endpoint_files(session.home)
    saved = write_backup(session.ledger, session.blobs, Path(target), session.clock, files)
    return _backup_view(target, saved)


def restore(session: Session, source: str | Path) -> BackupView:
    """Bring a backup into an empty home; endpoints are started again by the next `onejob up`."""
    home = session.home
    saved = read_backup(Path(source), home.ledger_url, session.blobs, home.root, session.clock)
    return _backup_view(source, saved)


def _backup_view(path: str | Path, saved: Saved) -> BackupView:
    return BackupView(str(path), blobs=saved.blobs, size=saved.size, runs=saved.rows.get("run", 0), files=saved.files)


def _endpoint_files(home: Home) -> Iterator[tuple[str, Path]]:
    """What capture and labels hold that isn't kept yet, the number of the last labels, the key of private columns.

    Sealed files follow the open ones, so one that is sealed meanwhile is found. All are restored as open: nobody
    writes them any more, so the next `onejob up` cuts off what is half written, and seals them.
    """
    for folder in sorted(path for path in (home.root / "endpoints").glob("*") if path.is_dir()):
        for kind in (CAPTURE, LABELS):
            for place in (OPEN, SEALED):
                for path in sorted((folder / kind / place).glob("[!.]*")):
                    yield f"endpoints/{folder.name}/{kind}/{OPEN}/{path.name}", path
        for name in (f"{LABELS}/{ORDER}", SECRET):  # last: they fit what was written before
            yield f"endpoints/{folder.name}/{name}", folder / name
