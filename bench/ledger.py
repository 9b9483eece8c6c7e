"""How fast the ledger is, and whether it ever gives a step to two: N steps claimed and finished by P processes.

    python bench/ledger.py [--steps 10000] [--processes 4] [--url sqlite:////tmp/ledger.db | --postgres]

Every key is wanted by two processes, and all walk in the same order, so that they meet all the time; a step is three
transactions (claim, start, finish) and one refused claim. Afterwards two witnesses are asked about double claims: the
processes' own notes of what they won, and the ledger's executions and events.
"""

from __future__ import annotations

import argparse
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import text

from onejob.core.state import ExecutionState
from onejob.store.leases import this_process
from onejob.store.ledger import SqlLedger
from onejob.testing.ledger_samples import new_run, request, some_artifact
from onejob.testing.postgres import PostgresServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--url", help="an empty database; unset: SQLite in a temporary folder")
    parser.add_argument("--postgres", action="store_true", help="start a throw-away PostgreSQL (fsync off)")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--notes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.url, options.steps, *options.worker, Path(options.notes))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = options.url or f"sqlite:///{folder / 'ledger.db'}"
        if options.postgres:
            url = stack.enter_context(PostgresServer()).database("bench")
        measure(url, options.steps, options.processes, folder)


def measure(url: str, steps: int, processes: int, folder: Path) -> None:
    """Run the processes, and print what they did and what the witnesses say."""
    ledger = SqlLedger(url)
    ledger.add_run(new_run())
    command = [sys.executable, __file__, "--url", url, "--steps", str(steps), "--notes", str(folder)]
    started = time.perf_counter()
    workers = [subprocess.Popen([*command, "--worker", str(n), str(processes)]) for n in range(processes)]
    codes = [worker.wait() for worker in workers]
    seconds = time.perf_counter() - started
    notes = [(folder / f"won-{n}").read_text().splitlines() for n in range(processes)]
    won = [key for note in notes for key in note]
    executions = ledger.list_executions()
    claimed = Counter(event.data["key"] for event in ledger.events() if event.kind == "claimed")
    seqs = [event.seq for event in ledger.events()]
    with ledger.snapshot() as connection:
        server = connection.dialect.name
        number = sqlite3.sqlite_version if server == "sqlite" else connection.scalar(text("SHOW server_version"))
    ledger.close()
    kind = "durable transaction" if server == "sqlite" else "transaction, durable if the server is"
    versions = f"Python {platform.python_version()}, SQLAlchemy {version('sqlalchemy')}, psycopg {version('psycopg')}"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{server} {number}; {versions}; {os.cpu_count()} CPUs, load {load}")
    print(f"{steps} steps by {processes} processes in {seconds:.1f} s, start of the processes included:")
    print(f"  {steps / seconds:.0f} steps/s; {3 * steps / seconds:.0f} changes of state/s, each a {kind}")
    print(f"  exit codes {codes}; won per process {[len(note) for note in notes]}")
    print(f"  keys won twice, by the processes' notes: {sum(n > 1 for n in Counter(won).values())}")
    print(f"  keys claimed twice, by the events: {sum(n > 1 for n in claimed.values())}")
    done = Counter(e.key for e in executions if e.state is ExecutionState.DONE)
    print(f"  keys with other than one done execution: {sum(done[f'key{n}'] != 1 for n in range(steps))}")
    print(f"  gaps in the log of {len(seqs)} events: {len(seqs) - len(set(seqs)) + (max(seqs) - len(seqs))}")


def work(url: str, steps: int, number: int, processes: int, notes: Path) -> None:
    """Claim the keys of this process and of the one before; do those that are won, leave the rest to the other."""
    ledger, me = SqlLedger(url), this_process()
    mine = {number, (number - 1) % processes}
    keys = [key for key in range(steps) if key % processes in mine]
    room = {"cpus": 1000.0, "gpus": []}
    with (notes / f"won-{number}").open("w") as file:
        for key in keys:
            claim = ledger.claim(request(1, f"key{key}", capacity=room), me, 60.0)
            if claim.answer != "won":
                continue
            assert claim.execution is not None
            assert claim.execution.lease is not None
            file.write(f"key{key}\n")
            token = claim.execution.lease.token
            ledger.start_execution(claim.execution.id, token, {"pid": me.pid})
            outputs = {"out": some_artifact(f"key{key}")}
            ledger.finish_execution(claim.execution.id, token, ExecutionState.DONE, outputs=outputs)
    ledger.close()


if __name__ == "__main__":
    main()
