"""`onejob serve`: serve a model with one command, without a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import click

from onejob.cli import output, progress, stop
from onejob.cli.options import Call, verb
from onejob.cli.run import serving
from onejob.errors import from_json
from onejob.loop import commands
from onejob.loop.views import EndpointView, RunView


@verb(
    "serve",
    refs=True,
    examples=[
        ("onejob serve resnet.onnx", "a file; the endpoint is called resnet"),
        ("onejob serve models/ --port 8000", "a folder of models in Triton's layout: NAME/1/model.onnx"),
        ("onejob serve flights/engine@champion --name flights-eu", "what a job has made, at another endpoint"),
        ("onejob serve models/ --port 8000 --foreground", "until Ctrl-C or SIGTERM: in a container, or as a service"),
        ("onejob serve model.onnx --replicas 2 --latency-ms 20", "two processes; batches that keep 20 ms"),
    ],
)
@click.argument("model")
@click.option("--name", help="The endpoint's name; that of the model if it isn't a folder of models.")
@click.option("--host", help="Address to listen on, or unix:/run/model.sock. Default: 127.0.0.1; 0.0.0.0: the network.")
@click.option("--port", type=int, help="Port to listen on. Default: a free one, which it keeps.")
@click.option("--replicas", type=int, help="How many processes answer. Default: 1.")
@click.option("--engine", type=click.Choice(["own", "triton"]), help="A Triton server below each replica, or none.")
@click.option("--threads", type=int, help="Threads of the engine in each. Default: the cores, over the replicas.")
@click.option("--max-batch", type=int, help="Most rows that run at once. Default: 64.")
@click.option("--latency-ms", type=float, help="Latency that is wanted: batches are made no larger than keeps it.")
@click.option("--foreground", is_flag=True, help="Stay; SIGTERM or Ctrl-C ends the endpoint, once it has answered.")
def command(
    call: Call,
    model: str,
    name: str | None,
    host: str | None,
    port: int | None,
    replicas: int | None,
    engine: str | None,
    threads: int | None,
    max_batch: int | None,
    latency_ms: float | None,
    foreground: bool,
) -> None:
    """Serve a model file (ONNX, OpenVINO, a Python file), a folder of models, or what a ref names.

    The file is kept by its digest, so what is served stays what it was. The endpoint goes on serving when the command
    has returned, until `onejob stop`; with --foreground it ends with the command. `onejob ps`, `show`, `logs` and
    `trace` know it like any other.
    """
    batch = {key: value for key, value in (("max", max_batch), ("latency_ms", latency_ms)) if value is not None}
    options = {
        "host": host,
        "port": port,
        "replicas": replicas,
        "engine": engine,
        "threads": threads,
        "batch": batch or None,
    }
    signals: AbstractContextManager[Sequence[int]] = commands.collected_signals() if foreground else nullcontext([])
    with call.session() as session, signals as asked:
        with progress.follow(call) as on_view:
            view = commands.serve(session, model, name=name, on_view=on_view, **options)
        if view.error:
            raise from_json({key: str(value) for key, value in view.error.items()})
        assert view.endpoint is not None
        call.show(view, render)
        _advise(call, view.endpoint, stays=foreground)
        if foreground:
            sys.stdout.flush()
            ended = commands.stay(session, view.endpoint.name, asked)
            if not call.as_json:
                call.show(ended, stop.render)


def _advise(call: Call, served: EndpointView, *, stays: bool) -> None:
    if served.repository:
        first = (output.curl(served.url, "/v2/repository/index", "-s -X POST"), "its models")
        second = (f"onejob bench {served.name} --model MODEL", "how quick one of them is")
    else:
        first = (output.curl(served.url, f"/v2/models/{served.name}"), "what it takes and gives")
        second = (f"onejob bench {served.name}", "how quick it is")
    call.hints(first, second, *([] if stays else [(f"onejob stop {served.name}", "end it")]))


def render(view: RunView) -> str:
    """One line."""
    assert view.endpoint is not None
    return serving(view.endpoint)
