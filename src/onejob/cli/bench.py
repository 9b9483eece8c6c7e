"""`onejob bench`: how quick a server is, under which load, and how that compares with another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.console import Group, RenderableType

from onejob.cli import curves, output
from onejob.cli.curves import milliseconds
from onejob.cli.options import Call, verb
from onejob.errors import NotFoundError, UsageError
from onejob.loop import commands
from onejob.loop.commands.bench import (
    BenchView,
    Measured,
    Ratio,
    Searched,
    TargetView,
    Wish,
    is_url,
    parse_goals,
    parse_header,
    wishes,
)

INTERRUPTED, NOTHING = 130, 9
TYPES = {".json": "application/json", ".jsonl": "application/json", ".ndjson": "application/json"}
LINES = (".jsonl", ".ndjson")
COLUMNS = ("p50", "p90", "p99", "p99.9", "max")
WORDS = {"requests_per_s": "requests/s", "p50_ms": "p50", "p99_ms": "p99", "cpu_us": "CPU a request"}
KINDS = 6
"""Kinds of errors that are told with their text."""


@verb(
    "bench",
    examples=[
        ("onejob bench flights", "an endpoint of this home: 16 connections that ask as fast as they are answered"),
        ("onejob bench http://127.0.0.1:8000 --model mlp --connections 64", "a model of any KServe v2 server"),
        ("onejob bench flights --rate 2000", "2,000 requests/s at random, whatever the answers take: an open loop"),
        ("onejob bench flights --ramp 100:5000 --duration 1m", "a rate that rises: where does the latency turn up?"),
        ("onejob bench flights --slo p99_ms=10", "the highest rate at which 99 % are answered within 10 ms"),
        ("onejob bench http://127.0.0.1:8000/v2/models/a http://127.0.0.1:9000/v2/models/a", "two servers, in turns"),
        ("onejob bench http://127.0.0.1:3000/predict --data body.json", "a plain POST to anything"),
    ],
)
@click.argument("targets", nargs=-1, required=True, metavar="URL|ENDPOINT...")
@click.option("-m", "--model", default="", metavar="NAME", help="The model, where the URL names a server only.")
@click.option(
    "-c",
    "--connections",
    metavar="N[,N…]",
    help="Connections, each with one request at a time; a list: one after the other. Default: 16, or 128 with a rate.",
)
@click.option(
    "--rate",
    metavar="R[,R…]",
    help="Requests a second that are due whatever the answers take (an open loop); a list: one after the other.",
)
@click.option("--ramp", metavar="FROM:TO", help="A rate that rises, or falls, evenly while it is measured.")
@click.option(
    "--closed",
    is_flag=True,
    help="With --rate: each connection keeps to its share of it, and waits for its answer first.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "even"]),
    default="poisson",
    show_default=True,
    help="How the requests of a rate are spread over time.",
)
@click.option(
    "-d",
    "--duration",
    metavar="TIME",
    help="How long to measure each target and load, such as 30s or 2m. Default: 10s.",
)
@click.option("-n", "--requests", metavar="N", help="Measure so many requests, in the place of a time.")
@click.option("--warmup", metavar="TIME", default="1s", show_default=True, help="Before each turn; it isn't counted.")
@click.option(
    "--timeout", metavar="TIME", default="10s", show_default=True, help="When a request without an answer is an error."
)
@click.option("--turns", metavar="N", help="How often several targets take turns. Default: 5.")
@click.option("-b", "--batch", metavar="N", default="1", show_default=True, help="Rows in a request.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["binary", "json"]),
    default="binary",
    show_default=True,
    help="How tensors are sent.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME:SIZES",
    help="The shape of an input where the model leaves it open, such as tokens:128; may be repeated.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A request's body from a file; of a .jsonl file each line, in turn.",
)
@click.option(
    "-H",
    "--header",
    "headers",
    multiple=True,
    metavar="'NAME: VALUE'",
    help="A header of every request; may be repeated.",
)
@click.option("--method", default="", metavar="WORD", help="Default: POST with a body, else GET.")
@click.option(
    "-p",
    "--processes",
    metavar="N",
    default="1",
    show_default=True,
    help="Processes that send; one does tens of thousands a second.",
)
@click.option("--cpus", metavar="LIST", help="Cores for these processes, such as 0 or 0,2-3; each is kept on one.")
@click.option(
    "--slo",
    "goals",
    multiple=True,
    metavar="GOAL",
    help="Search the highest rate that keeps it: p99_ms=10, errors=0.1%; may be repeated.",
)
@click.option("--seed", metavar="N", default="0", show_default=True, help="Of the random tensors and arrivals.")
def command(call: Call, /, targets: tuple[str, ...], **options: object) -> int:
    """Send a load to one or several servers, and tell how quickly they answer.

    A KServe v2 server (onejob, Triton, any) is sent random tensors that fit the model's metadata; anything else what
    --data holds. Latencies are corrected for coordinated omission where there is a rate. Several targets are measured
    in turns, A B B A, so that a busy neighbour meets both, and compared turn by turn.
    """
    wish = make_wish(options)
    needs_home = not all(is_url(target) for target in targets)
    with call.session() if needs_home else contextlib.nullcontext() as session, curves.follow(call) as on_look:
        view = commands.bench(session, targets, wish, on_look=on_look)
    call.show(view, render)
    return INTERRUPTED if view.interrupted else 0 if view.answered else NOTHING


def make_wish(options: Mapping[str, object]) -> Wish:
    """The options as what is asked for; UsageError names the option that can't be read."""

    def text(name: str) -> str:
        return str(options.get(name) or "")

    def whole(name: str) -> int:
        return int(wishes.numbers(text(name), f"--{name}", whole=True)[0])

    data = options.get("data")
    bodies, kind = read_bodies(data) if isinstance(data, Path) else ((), "")
    headers, shapes, goals = (_several(options.get(name)) for name in ("headers", "shapes", "goals"))
    return Wish(
        connections=tuple(map(int, wishes.numbers(text("connections"), "--connections", whole=True)))
        if text("connections")
        else (),
        rates=wishes.numbers(text("rate"), "--rate") if text("rate") else (),
        ramp=wishes.ramp(text("ramp")) if text("ramp") else None,
        closed=bool(options.get("closed")),
        arrivals=text("arrivals"),
        seconds=wishes.seconds(text("duration"), "--duration") if text("duration") else None,
        requests=whole("requests") if text("requests") else None,
        warmup=wishes.seconds(text("warmup"), "--warmup", zero=True),
        timeout=wishes.seconds(text("timeout"), "--timeout"),
        rounds=whole("turns") if text("turns") else None,
        processes=whole("processes"),
        cpus=wishes.cpus(text("cpus"), "--cpus", sorted(os.sched_getaffinity(0))) if text("cpus") else (),
        goals=parse_goals(goals) if goals else None,
        model=text("model"),
        batch=whole("batch"),
        form=text("form"),
        shapes=dict(map(wishes.shape, shapes)),
        data=bodies,
        data_type=kind,
        headers=tuple(map(parse_header, headers)),
        method=text("method").upper(),
        seed=int(wishes.numbers(text("seed"), "--seed", whole=True)[0]) if text("seed") != "0" else 0,
    )


def read_bodies(path: Path) -> tuple[tuple[bytes, ...], str]:
    """The bodies in a file, and their Content-Type."""
    kind = TYPES.get(path.suffix.lower(), "application/octet-stream")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"it can't be read: {error.strerror}", place=str(path)) from None
    if path.suffix.lower() not in LINES:
        return (data,), kind
    lines = tuple(line for line in data.splitlines() if line.strip())
    if not lines:
        raise UsageError("it has no lines", place=str(path), cure="Each line is a body.")
    return lines, kind


def _several(value: object) -> Sequence[str]:
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


# ---- the result


def render(view: BenchView) -> RenderableType:
    """What was asked, a line for each target and load, how they compare, and what to be wary of."""
    parts: list[RenderableType] = [asked(target) for target in view.targets]
    for words in dict.fromkeys(result.load for result in view.results):
        parts += _load(view, [result for result in view.results if result.load == words])
    for search in view.searches:
        parts += [output.title(f"{search.target}: {search.goals}"), _steps(search), ended(search)]
    if view.interrupted:
        parts += ["", "stopped: the figures are of the time until then"]
    return Group(*parts, *(["", *(f"warning: {text}" for text in view.warnings)] if view.warnings else []))


def asked(target: TargetView) -> str:
    """`flights  POST http://127.0.0.1:8080/v2/models/flights/infer, 342 bytes (binary tensors, batch 1)`."""
    form = f" ({target.form}, batch {target.batch})" if target.form else ""
    name = "" if target.name == target.url else f"{target.name}  "
    return f"{name}{target.method} {target.path} of {target.url}, {target.body_bytes:,} bytes{form}"


def _load(view: BenchView, results: Sequence[Measured]) -> list[RenderableType]:
    first = results[0]
    measured = f"{output.duration(first.seconds)} each" if len(results) > 1 else output.duration(first.seconds)
    parts: list[RenderableType] = [output.title(f"{first.load}, measured for {measured}"), figures(results)]
    if beside := [one for one in view.ratios if one.load == first.load]:
        parts.append(compared(beside))
    parts.append(output.muted(f"latencies in ms, {first.correction}"))
    for result in results:
        parts.append(output.muted(traffic(result, alone=len(results) == 1)))
        parts += faults(result, alone=len(results) == 1)
    return parts


def figures(results: Sequence[Measured]) -> RenderableType:
    """A line for each target."""
    columns = ["target", "requests/s", *COLUMNS, "errors", "CPU a request", "cores", "memory"]
    rows = []
    for one in results:
        server = one.server
        rows.append(
            (
                one.target if len(results) > 1 else "",  # one alone is named above
                output.number(float(one.requests_per_s)),
                *(_ms(one.latency_ms.get(name)) for name in COLUMNS),
                f"{one.errors:,}",
                f"{server.cpu_us:.4g} us" if server and server.cpu_us is not None else "",
                f"{server.cores:.2f}" if server else "",
                output.size(server.memory) if server else "",
            )
        )
    return output.table(columns, rows, right=columns[1:])


def traffic(result: Measured, *, alone: bool) -> str:
    """What went over the wire, and what sending it took."""
    name = "" if alone else f"{result.target}: "
    sent, received = output.size(result.sent_bytes_per_s), output.size(result.received_bytes_per_s)
    cost = result.client_cpu_us
    own = f"; sending took {cost:.3g} us of CPU a request, {result.client_cores:.2f} cores" if cost is not None else ""
    return f"{name}sent {sent}/s, received {received}/s{own}"


def compared(ratios: Sequence[Ratio]) -> RenderableType:
    """Each target over the first, with the interval of the mean."""
    columns = ["over the first", "of", "ratio", "95 % interval"]
    rows = [
        (
            one.target,
            WORDS[one.what],
            f"{one.ratio:.3f}",
            f"{one.low:.3f} to {one.high:.3f}" if one.low is not None and one.high is not None else "one turn: none",
        )
        for one in ratios
    ]
    return output.table(columns, rows, right=["ratio"])


def faults(result: Measured, *, alone: bool) -> list[RenderableType]:
    """Errors by their kinds, each with a text that came with it."""
    name = "" if alone else f"{result.target}: "
    told: list[RenderableType] = []
    for kind, count in list(result.errors_by_kind.items())[:KINDS]:
        sample = " ".join(result.samples.get(kind, "").split())
        told.append(f"{name}{count:,} x {kind}{f': {sample}' if sample else ''}")
    if result.unfinished:
        told.append(f"{name}{output.plural(result.unfinished, 'request')} without an answer yet")
    return told


def _steps(search: Searched) -> RenderableType:
    rows = [
        (
            output.number(float(step.rate)),
            output.number(float(step.requests_per_s)),
            *(_ms(step.latency_ms.get(name)) for name in COLUMNS),
            f"{step.errors:,}",
            "held" if step.held else step.why,
        )
        for step in search.steps
    ]
    columns = ["rate", "requests/s", *COLUMNS, "errors", "it"]
    return output.table(columns, rows, right=columns[:-1])


def ended(search: Searched) -> str:
    """Where the search ended."""
    if search.held is None:
        return "no rate kept it"
    failed = f"; {output.number(float(search.failed))}/s didn't" if search.failed is not None else ""
    return f"kept up to {output.number(float(search.held))}/s{failed}"


def _ms(value: float | None) -> str:
    return milliseconds(value).removesuffix(" ms")
