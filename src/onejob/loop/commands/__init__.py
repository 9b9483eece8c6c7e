"""Commands: all that a person (or the console) can ask for; each takes a session first and gives a frozen view."""

from onejob.loop.commands.bench import bench
from onejob.loop.commands.explain import diff, why
from onejob.loop.commands.keep import backup, gc, restore, verify
from onejob.loop.commands.label import label
from onejob.loop.commands.logs import logs
from onejob.loop.commands.look import ps, show, trace
from onejob.loop.commands.promote import promote, rollback
from onejob.loop.commands.run import check, collected_signals, run, up
from onejob.loop.commands.serve import serve
from onejob.loop.commands.signal import signal
from onejob.loop.commands.start import demo, doctor, init, list_examples, looked_after, schema
from onejob.loop.commands.stay import stay
from onejob.loop.commands.stop import stop
from onejob.loop.commands.year import has_year, play_year
from onejob.loop.factory import open_session as open

__all__ = [
    "backup",
    "bench",
    "check",
    "collected_signals",
    "demo",
    "diff",
    "doctor",
    "gc",
    "has_year",
    "init",
    "label",
    "list_examples",
    "logs",
    "looked_after",
    "open",
    "play_year",
    "promote",
    "ps",
    "restore",
    "rollback",
    "run",
    "schema",
    "serve",
    "show",
    "signal",
    "stay",
    "stop",
    "trace",
    "up",
    "verify",
    "why",
]
