"""The servers that are compared: what each needs, how it is started, and in what words it is asked.

Every one gets the same model, one thread for its engine, the same bound on a batch, and the settings that favour it:
batching on, no access log where a switch turns it off. Versions are pinned here. Triton comes with its Python backend
alone: nothing here says anything of its native backends.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onejob.serve.repository import scan, told
from serve import triton, wire
from serve.models import Model
from serve.wire import Message

APPS = Path(__file__).with_name("apps").resolve()
SOURCE = Path(__file__).resolve().parents[2]
ENGINE = "onnxruntime==1.32.0"
WAIT_MS = 1


@dataclass(frozen=True)
class Setting:
    """Where and with what a server is started."""

    env: Path
    """Its environment."""
    work: Path
    """A folder of its own, empty."""
    model: Model
    file: Path
    """The model's."""
    port: int
    replicas: int = 1
    ports: Sequence[int] = ()
    """Two more that are free, for those who want them."""
    names: Sequence[str] = ()
    """Names under which the model can be loaded and unloaded on demand; none of them is loaded at the start."""

    @property
    def python(self) -> str:
        return str(self.env / "bin" / "python")


@dataclass(frozen=True)
class Launch:
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """One server: `launch` writes what it needs into `work` and says what is to be started."""

    name: str
    packages: Sequence[str]
    launch: Callable[[Setting], Launch]
    path: str
    """Of the POST; `{model}` is the model's name."""
    wires: Mapping[str, Callable[[str, np.ndarray[Any, Any]], Message]]

    def message(self, wire_name: str, model: Model) -> Message:
        return self.wires[wire_name](self.path.format(model=model.name), wire.row(model))


def install(server: Server, folder: Path) -> Path:
    """Its environment, made where it isn't there; nothing for onejob itself, which is this checkout."""
    env = folder / server.name.partition("-")[0]
    if server.name.startswith("triton"):
        triton.install(env)
    elif server.packages and not (env / ".done").exists():
        subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
        subprocess.run([str(env / "bin" / "pip"), "install", "--quiet", *server.packages], check=True)
        (env / ".done").touch()
    return env


def launch_onejob(setting: Setting) -> Launch:
    return _onejob(setting, {})


def launch_onejob_capture(setting: Setting) -> Launch:
    return _onejob(setting, {"monitor": {"capture": {"rate": 1.0}}})


def _onejob(setting: Setting, more: Mapping[str, object]) -> Launch:
    engine = setting.work / "engine"
    engine.mkdir()
    (engine / "model.onnx").symlink_to(setting.file)
    repository = {"models": [], "repository": str(onejob_repository(setting))} if setting.names else {}
    options = {"replicas": setting.replicas, "threads": 1, "batch": {"max": setting.model.batch}, **more}
    served = {"digest": "ab" * 32, "execution": None, "meta": {"engine": "onnxruntime"}, "dir": str(engine)}
    desired = {"name": setting.model.name, "generation": 1, "host": "127.0.0.1", "port": setting.port, **repository}
    (setting.work / "desired.json").write_text(json.dumps({**desired, "options": options, "engine": served}))
    return Launch([sys.executable, "-m", "onejob.serve.host", str(setting.work)])


def launch_onejob_python(setting: Setting) -> Launch:
    """Triton's repository as it is, with its `TritonPythonModel`."""
    repository = triton_repository(setting)
    options = {"replicas": setting.replicas, "threads": 1, "batch": {"max": setting.model.batch}}
    models = [told(version, setting.work) for version in scan(repository)]
    whole = {"digest": "ab" * 32, "execution": None, "meta": {"engine": "repository"}, "dir": str(setting.work)}
    desired = {"name": "models", "generation": 1, "host": "127.0.0.1", "port": setting.port, "options": options}
    desired |= {"models": models, "repository": str(repository), "engine": whole}
    (setting.work / "desired.json").write_text(json.dumps(desired))
    return Launch([sys.executable, "-m", "onejob.serve.host", str(setting.work)])


def onejob_repository(setting: Setting) -> Path:
    """A model repository that holds the model under each name; none of them is loaded at the start."""
    repository = setting.work / "repository"
    for name in setting.names:
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").symlink_to(setting.file)
        (repository / name / "config.pbtxt").write_text(f"max_batch_size: {setting.model.batch}\n")
    return repository


def triton_repository(setting: Setting) -> Path:
    """A model repository that holds the model under each name."""
    model, repository = setting.model, setting.work / "repository"
    shape = ", ".join(map(str, model.shape))
    for name in setting.names or [model.name]:
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").symlink_to(setting.file)
        shutil.copy(APPS / "triton_model.py", version / "model.py")
        (repository / name / "config.pbtxt").write_text(
            f'backend: "python"\nmax_batch_size: {model.batch}\n'
            f'input [{{ name: "x" data_type: TYPE_FP32 dims: [{shape}] }}]\n'
            f'output [{{ name: "y" data_type: TYPE_FP32 dims: [{model.classes}] }}]\n'
            f"dynamic_batching {{}}\ninstance_group [{{ kind: KIND_CPU count: {setting.replicas} }}]\n"
        )
    return repository


def launch_triton(setting: Setting) -> Launch:
    repository = triton_repository(setting)
    more = ["--model-control-mode=explicit"] if setting.names else []
    ports = ["--http-address=127.0.0.1", f"--http-port={setting.port}", "--allow-grpc=0"]
    ports.append(f"--metrics-port={setting.ports[0]}")
    return Launch(
        triton.command(setting.env, repository, [*ports, *triton.QUIET, *more]), triton.environment(setting.env)
    )


def launch_mlserver(setting: Setting) -> Launch:
    shutil.copy(APPS / "mlserver_model.py", setting.work)
    told = {"http_port": setting.port, "grpc_port": setting.ports[0], "metrics_port": setting.ports[1]}
    told |= {"parallel_workers": 0}  # in the server's own process; with uvloop 0.23 its workers don't start
    (setting.work / "settings.json").write_text(json.dumps({"host": "127.0.0.1", "debug": False, **told}))
    model = {
        "name": setting.model.name,
        "implementation": "mlserver_model.Onnx",
        "max_batch_size": setting.model.batch,
        "max_batch_time": WAIT_MS / 1000,
        "parameters": {"uri": str(setting.file)},
    }
    (setting.work / "model-settings.json").write_text(json.dumps(model))
    return Launch([str(setting.env / "bin" / "mlserver"), "start", str(setting.work)])


def launch_litserve(setting: Setting) -> Launch:
    told = [str(setting.port), str(setting.model.batch), str(WAIT_MS / 1000), str(setting.replicas)]
    return Launch([setting.python, str(APPS / "litserve_app.py"), str(setting.file), *told])


def launch_bentoml(setting: Setting) -> Launch:
    env = {
        "BENCH_MODEL": str(setting.file),
        "BENCH_BATCH": str(setting.model.batch),
        "BENCH_WAIT_MS": "1000",  # its bound on latency, not a wait: it refuses requests that would take longer
        "BENCH_WORKERS": str(setting.replicas),
        "BENTOML_DO_NOT_TRACK": "1",
        "BENTOML_HOME": str(setting.work / "home"),
    }
    port = ["--host", "127.0.0.1", "--port", str(setting.port), "--working-dir", str(APPS)]
    return Launch([str(setting.env / "bin" / "bentoml"), "serve", "bentoml_app:Onnx", *port], env)


def launch_fastapi(setting: Setting) -> Launch:
    told = ["--host", "127.0.0.1", "--port", str(setting.port), "--workers", str(setting.replicas), "--no-access-log"]
    argv = [setting.python, "-m", "uvicorn", "fastapi_app:app", "--app-dir", str(APPS), *told]
    return Launch(argv, {"BENCH_MODEL": str(setting.file)})


V2 = {"binary": wire.binary, "json": wire.v2}
V2_PATH = "/v2/models/{model}/infer"
SERVERS: Mapping[str, Server] = {
    server.name: server
    for server in (
        Server("onejob", (), launch_onejob, V2_PATH, V2),
        Server("onejob-capture", (), launch_onejob_capture, V2_PATH, V2),
        Server("onejob-python", (), launch_onejob_python, V2_PATH, V2),
        Server("triton", triton.PACKAGES, launch_triton, V2_PATH, V2),
        Server("mlserver", ("mlserver==1.7.1", ENGINE), launch_mlserver, V2_PATH, {"json": wire.v2}),
        Server("litserve", ("litserve==0.2.19", ENGINE), launch_litserve, "/predict", {"json": wire.nested}),
        Server("bentoml", ("bentoml==1.4.40", ENGINE), launch_bentoml, "/predict", {"json": wire.nested}),
        Server(
            "fastapi",
            ("fastapi==0.165.0", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0", ENGINE),
            launch_fastapi,
            "/infer",
            V2,
        ),
    )
}
