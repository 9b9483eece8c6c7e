"""onejob's serving beside Triton (its Python backend), MLServer, LitServe, BentoML and plain FastAPI, in one run.

    python bench/serving.py                            # all cases; the first call installs the peers, some minutes
    python bench/serving.py --cases mlp-binary mlp-one --servers onejob triton --turns 5
    python bench/serving.py --cases soak --requests 1000000

Same model, same numbers in the request; the server on one core, wrk on another, the servers asked by turns. Needs wrk
and taskset (`apt-get install wrk util-linux`); the peers get environments of their own in --envs, nothing of them comes
into the checkout's. Nothing here is said of Triton's native backends: they can't be had from a package registry.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from machine import describe
from serve import long, models, report, wrk
from serve.cases import CASES, measure
from serve.processes import FailedError, boost
from serve.servers import SERVERS, install
from serve.stage import Cores, Stage
from serve.wrk import Load

Part = Callable[[], None]
LONG = ("start", "idle", "soak", "reloads")
V2 = ("onejob", "triton")
"""Who has the v2 protocol's health and binary tensors."""


def main() -> None:
    options = _options()
    envs: Path = options.envs.expanduser().resolve()
    envs.mkdir(parents=True, exist_ok=True)
    wanted = options.servers or [*SERVERS]
    for name in wanted:
        install(SERVERS[name], envs)
    models.make(envs / "models")
    if options.cases == ["install"]:
        return
    _many_files()
    print(f"$ python bench/serving.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"{describe()}\n{_versions(envs, wanted)}")
    print(f"server on core {options.server_core}, load on core {options.load_core}, {_commit()}")
    if not boost():
        print("autogroup's priority can't be raised here: neighbours' work will be seen in the figures")
    stage = Stage(envs, envs / "models", Cores(options.server_core, options.load_core))
    with tempfile.TemporaryDirectory() as folder:
        load = Load(Path(folder), options.load_core)
        failed = False
        for case in options.cases or [*CASES, *LONG]:
            for part in _parts(case, stage, load, wanted, options):
                try:
                    part()
                except FailedError as error:
                    failed = True
                    print(f"\n{case} failed: {error}", flush=True)
        print(f"\n{describe().splitlines()[0]}, at the end")
    sys.exit(failed)


def _parts(case: str, stage: Stage, load: Load, wanted: Sequence[str], o: argparse.Namespace) -> list[Part]:
    """What a case consists of; if one part fails, the others go on."""
    if case in CASES:
        chosen = [name for name in CASES[case].servers if name in wanted]
        return [lambda: print(report.table(measure(stage, load, CASES[case], chosen, o.turns, o.seconds)), flush=True)]
    if case == "start":
        return [lambda: long.starts(stage, [name for name in wanted if not name.startswith("onejob-")], o.turns)]
    if case == "idle":
        return [partial(long.idle, stage, load, name, o.connections, o.hold) for name in V2 if name in wanted]
    if case == "soak":
        names = ("onejob", "onejob-capture", "triton")
        return [partial(long.soak, stage, load, name, o.requests) for name in names if name in wanted]
    return [partial(long.reloads, stage, name, o.models, o.cycles) for name in V2 if name in wanted]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *LONG, "install"], default=[], metavar="CASE")
    parser.add_argument("--servers", nargs="*", choices=[*SERVERS], default=[], metavar="SERVER")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    parser.add_argument("--envs", type=Path, default=cache / "onejob-bench", help="the peers' environments")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3, help="of load in each turn")
    parser.add_argument("--server-core", default="1")
    parser.add_argument("--load-core", default="0")
    parser.add_argument("--connections", type=int, default=5000, help="case idle")
    parser.add_argument("--hold", type=float, default=30, help="case idle: seconds that they are held")
    parser.add_argument("--requests", type=int, default=10_000_000, help="case soak")
    parser.add_argument("--models", type=int, default=100, help="case reloads")
    parser.add_argument("--cycles", type=int, default=2000, help="case reloads")
    parser.epilog = f"cases: {', '.join([*CASES, *LONG])}, install; servers: {', '.join(SERVERS)}"
    return parser.parse_args()


def _versions(envs: Path, wanted: Sequence[str]) -> str:
    """What is installed where, as pip says it; and the load."""
    shown = (
        "onnxruntime",
        "numpy",
        "uvicorn",
        "uvloop",
        "fastapi",
        "nvidia-pytriton",
        "mlserver",
        "litserve",
        "bentoml",
    )
    lines = [f"load: {wrk.version()}"]
    for name in wanted:
        env = envs / name
        if not SERVERS[name].packages:
            continue
        code = "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions()), sep='\\n')"
        out = subprocess.run([str(env / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True)
        told = [line for line in sorted(set(out.stdout.splitlines())) if line.split()[0].lower() in shown]
        lines.append(f"{name}: {', '.join(told)}")
    return "\n".join(lines)


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return f"commit {told.stdout.strip() or 'unknown'}"


def _many_files() -> None:
    """As many open files as are allowed: servers inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
