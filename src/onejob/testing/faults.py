"""Fault points by name, and how a test arms one: the process that reaches it dies there by SIGKILL (core/faults.py).

    subprocess.run(["onejob", "run", "job.toml"], env={**os.environ, **armed("shim.before_exit")})

The variable is inherited by every process below, and a point belongs to one part: so arming `step.before_entry` for a
supervisor kills the step, and nothing else.
"""

from __future__ import annotations

from onejob.core.faults import VARIABLE

POINTS: dict[str, str] = {
    # exec: the supervisor's side
    "local.before_shim": "The task's folder holds shim.json; no shim was started.",
    "local.after_shim": "A shim was started; nobody has waited for it, or noted its handle.",
    # exec: the shim
    "shim.before_started": "The shim runs, and nobody can know it: there is no started.json.",
    "shim.after_started": "started.json is there; no rank was started.",
    "shim.after_ranks": "The ranks run.",
    "shim.before_exit": "Everything that the task had started has ended; there is no exit.json.",
    "shim.after_exit": "exit.json is there; the shim is about to end.",
    # exec: a rank of a step
    "step.before_entry": "The entry is loaded, and not yet called.",
    "step.after_entry": "The entry has returned; its outputs were not checked.",
    "step.before_exit": "All is written and checked; the process is about to end.",
}
"""Name -> what is true at that line."""


def armed(name: str, nth: int = 1) -> dict[str, str]:
    """Environment that kills the process which passes this point for the n-th time."""
    assert name in POINTS, f"{name!r} is no fault point; known: {', '.join(POINTS)}"
    return {VARIABLE: f"{name}:{nth}"}
