"""`onejob serve`: serve a model with one command, without a job."""

from __future__ import annotations

import click

from onejob.cli import output, progress
from onejob.cli.options import Call, verb
from onejob.cli.run import serving
from onejob.errors import from_json
from onejob.loop import commands
from onejob.loop.views import RunView


@verb(
    "serve",
    refs=True,
    examples=[
        ("onejob serve resnet.onnx", "a file; the endpoint is called resnet"),
        ("onejob serve models/ --port 8000", "a folder of models in Triton's layout: NAME/1/model.onnx"),
        ("onejob serve flights/engine@champion --name flights-eu", "what a job has made, at another endpoint"),
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
) -> None:
    """Serve a model file (ONNX, OpenVINO, a Python file), a folder of models, or what a ref names.

    The file is kept by its digest, so what is served stays what it was. The endpoint goes on serving when the command
    has returned, until `onejob stop`; `onejob ps`, `show`, `logs` and `trace` know it like any other.
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
    with call.session() as session, progress.follow(call) as on_view:
        view = commands.serve(session, model, name=name, on_view=on_view, **options)
    if view.error:
        raise from_json({key: str(value) for key, value in view.error.items()})
    call.show(view, render)
    assert view.endpoint is not None
    served = view.endpoint
    if served.repository:
        first = (output.curl(served.url, "/v2/repository/index", "-s -X POST"), "its models")
        second = (f"onejob bench {served.name} --model MODEL", "how quick one of them is")
    else:
        first = (output.curl(served.url, f"/v2/models/{served.name}"), "what it takes and gives")
        second = (f"onejob bench {served.name}", "how quick it is")
    call.hints(first, second, (f"onejob stop {served.name}", "end it"))


def render(view: RunView) -> str:
    """One line."""
    assert view.endpoint is not None
    return serving(view.endpoint)
