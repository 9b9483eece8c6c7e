"""A model repository for Triton, of what our engines run.

    NAME/config.pbtxt
    NAME/1/…               the artifact's files; for the Python backend also model.py and onejob.json

A version is written aside and then renamed: a Triton that watches the folder never sees half of one. For the Python
backend the model's own `model.py`, where it has one, goes into a folder below (MODEL).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.context import write_json
from onejob.engines import open_model
from onejob.engines.triton.config import NATIVE, Batching, Config, config, text
from onejob.errors import ConflictError, DataError, UsageError

CONFIG = "config.pbtxt"
TOLD = "onejob.json"
MODEL = "model"
ENGINES: Mapping[str, str] = {
    "model.onnx": "onnxruntime",
    "model.xml": "openvino",
    "model.py": "function",
    "model.safetensors": "pytorch",
}
"""What runs a model whose metadata doesn't say: by its file."""
OWN = tuple(one.backend for one in NATIVE.values())
DEFAULT = Batching()
ENTRY = '''"""Runs the model in {model}/ with onejob's engine {engine}, in Triton's Python backend."""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path += json.loads((Path(__file__).parent / "{told}").read_text())["path"]

from onejob.engines.triton.stub import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
'''


def write_model(
    folder: Path,
    meta: Mapping[str, Json],
    target: Path,
    name: str,
    *,
    version: int = 1,
    native: Collection[str] = OWN,
    threads: int = 1,
    batching: Batching = DEFAULT,
    link: bool = False,
    path: Sequence[str] = (),
) -> Config:
    """Write a model into the repository `target`, as a version of `name`; gives what Triton is told of it.

    `native` are the backends that the Triton has which will read it: a model of another engine gets the Python
    backend, for which onejob must be installed where Triton's Python finds it, or in one of the folders `path`. `link`:
    files are linked, not copied.

    ConflictError if that version is there. What `open_model` raises: the model is opened, to know what it takes.
    """
    if not name or "/" in name or name.startswith("."):
        raise UsageError(f"{name!r} is no name for a model", place="Triton's repository")
    if target.resolve().is_relative_to(folder.resolve()):
        raise UsageError("it lies in the model's own folder", place=str(target), cure="Write it elsewhere.")
    engine = engine_of(folder, meta)
    inner = {**meta, "engine": engine}
    model = open_model(folder, inner, threads=threads)
    try:
        by_triton = engine in NATIVE and NATIVE[engine].backend in native
        told = config(name, engine, model.inputs, model.outputs, native=by_triton, threads=threads, batching=batching)
    finally:
        model.close()
    if told.file and not (folder / told.file).is_file():
        told = replace(told, file="")  # the one that the backend looks for by itself
    place = target / name
    place.mkdir(parents=True, exist_ok=True)
    final, aside = place / str(version), place / f".{version}.{os.getpid()}"
    if final.exists():
        raise ConflictError("this version is there already", place=str(final), cure="Give it another number.")
    shutil.rmtree(aside, ignore_errors=True)
    _put(folder, aside if by_triton else aside / MODEL, link=link)
    if not by_triton:
        (aside / "model.py").write_text(ENTRY.format(model=MODEL, engine=engine, told=TOLD))
        write_json(aside / TOLD, {"meta": inner, "threads": threads, "path": list(path)})
    _write_config(place / CONFIG, text(told))
    aside.rename(final)
    return told


def engine_of(folder: Path, meta: Mapping[str, Json]) -> str:
    """Which of our engines runs the model: as its metadata says, or by its file."""
    named = meta.get("engine")
    if named and named != "triton":
        return str(named)
    for file, engine in ENGINES.items():
        if (folder / file).is_file():
            return engine
    raise DataError("there is no model in it", place=str(folder), cure=f"One of {', '.join(ENGINES)} is wanted.")


def read_told(version: Path) -> tuple[Path, dict[str, Json], int]:
    """What the Python backend is to run: the model's folder, its metadata, threads."""
    told = json.loads((version / TOLD).read_bytes())
    return version / MODEL, told["meta"], int(told["threads"])


def _put(folder: Path, target: Path, *, link: bool) -> None:
    def put(source: str, copy: str) -> None:
        os.symlink(Path(source).resolve(), copy) if link else shutil.copyfile(source, copy)

    shutil.copytree(folder, target, copy_function=put, ignore=shutil.ignore_patterns("__pycache__"))


def _write_config(path: Path, content: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(content)
    aside.replace(path)
