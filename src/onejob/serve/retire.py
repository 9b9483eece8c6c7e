"""Keep the counts of replicas that have ended: their last snapshots are folded into one file."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.counters import PARTS, RETIRED, Counters, parts_of, read_snapshots
from onejob.core.faults import reach
from onejob.serve.folder import replace_json

REMEMBERED = 1000
"""So many folded identities are kept, to fold nobody twice."""
APART = {"engines": 16, "models": 4096}
"""So many engines' and models' counts are told apart; those of older ones are in the sum only."""


def retire(folder: Path, living: Container[int]) -> None:
    """Fold the snapshots of all but the living, then delete them; a crash in between folds nobody twice."""
    found = read_snapshots(folder)
    ended = {identity: snapshot for identity, snapshot in found.live.items() if _pid(identity) not in living}
    if ended:
        total = sum((Counters.from_json(snapshot) for snapshot in ended.values()), found.retired)
        folded: list[Json] = [*found.folded, *ended][-REMEMBERED:]
        kept: dict[str, Json] = {}
        for part in PARTS:
            counted = dict(found.retired_parts.get(part, {}))
            for snapshot in ended.values():
                for name, counters in parts_of(snapshot, part).items():
                    counted[name] = counted.pop(name, Counters()) + counters  # the last to count comes last
            kept[part] = {name: counters.to_json() for name, counters in list(counted.items())[-APART[part] :]}
        replace_json(folder / RETIRED, {"folded": folded, **total.to_json(), **kept})
    reach("host.retire")
    for path in folder.glob("*.json"):
        if path.name != RETIRED and path.stem.isdigit() and int(path.stem) not in living:
            path.unlink(missing_ok=True)


def _pid(identity: str) -> int:
    return int(identity.partition(":")[0])
