"""Keep the counts of replicas that have ended: their last snapshots are folded into one file."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.context import write_json
from onejob.core.counters import RETIRED, Counters, engines_of, read_snapshots
from onejob.core.faults import reach

REMEMBERED = 1000
"""So many folded identities are kept, to fold nobody twice."""
ENGINES = 16
"""So many engines' counts are told apart; those of older ones are in the sum only."""


def retire(folder: Path, living: Container[int]) -> None:
    """Fold the snapshots of all but the living, then delete them; a crash in between folds nobody twice."""
    found = read_snapshots(folder)
    ended = {identity: snapshot for identity, snapshot in found.live.items() if _pid(identity) not in living}
    if ended:
        total, engines = found.retired, dict(found.retired_engines)
        for snapshot in ended.values():
            total = total + Counters.from_json(snapshot)
            for digest, counters in engines_of(snapshot).items():
                engines[digest] = engines.pop(digest, Counters()) + counters  # the last to count comes last
        folded: list[Json] = [*found.folded, *ended][-REMEMBERED:]
        kept = {digest: counters.to_json() for digest, counters in list(engines.items())[-ENGINES:]}
        write_json(folder / RETIRED, {"folded": folded, **total.to_json(), "engines": kept})
    reach("host.retire")
    for path in folder.glob("*.json"):
        if path.name != RETIRED and path.stem.isdigit() and int(path.stem) not in living:
            path.unlink(missing_ok=True)


def _pid(identity: str) -> int:
    return int(identity.partition(":")[0])
