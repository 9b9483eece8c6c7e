"""A model repository in Triton's layout, and what of it is served: pure but for reading and copying files.

    NAME/config.pbtxt         optional: max_batch_size, version_policy, dynamic_batching are read
    NAME/1/model.onnx         a version: model.onnx, or model.xml with model.bin, or model.py
    NAME/1/labels.txt         other files go along

A file right below the repository (`NAME.onnx`) is a model of one version. What is served is a copy, named by its
digest: a file that is changed under the server changes nothing until it is loaded again.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onejob.core.artifact import Artifact, FileEntry, Json, digest_file
from onejob.errors import BadRequestError, DataError, NotFoundError, OnejobError, StorageFullError, StoreError
from onejob.serve import pbtxt, triton_model

CONFIG = "config.pbtxt"
UNLOADED = "unloaded"
MODELS = "models"
"""Below an endpoint's folder: copies of what was loaded, by digest."""
ENGINES: tuple[tuple[str, str], ...] = (
    ("model.onnx", "onnxruntime"),
    ("model.xml", "openvino"),
    ("model.py", "function"),
)
"""The file that a version holds -> the engine that runs it."""
BACKENDS: Mapping[str, Sequence[tuple[str, str]]] = {
    "python": [("model.py", "function")],
    "onnxruntime": [("model.onnx", "onnxruntime")],
    "openvino": [("model.xml", "openvino"), ("model.onnx", "openvino")],
}
"""Of Triton's backends those that are here: the files that they take, and the engine that runs them."""
PLATFORMS = {"onnxruntime_onnx": "onnxruntime"}
MOST_ROWS = 65_536
"""A larger batch isn't run, whatever a model's configuration says: as in a job's [serve]."""
LONGEST = 200
"""Bytes of a model's name: it is a folder's."""


@dataclass(frozen=True)
class Version:
    """A version of a model, as it lies in a repository."""

    name: str
    version: str
    folder: Path
    file: str
    """Relative to the folder: the model."""
    only: bool
    """Whether nothing else in the folder belongs to it."""
    options: Mapping[str, Json]
    labels: Mapping[str, Json] = field(default_factory=dict)
    """Output -> what its classes are called."""
    config: Mapping[str, Json] = field(default_factory=dict)
    """What config.pbtxt says."""
    model: Path | None = None
    """The folder that holds the versions."""
    runs: str = ""
    """The engine that its configuration names."""

    @property
    def engine(self) -> str:
        return self.runs or engine_of(self.file)

    def artifact(self) -> tuple[Artifact, dict[str, Path]]:
        """What it is as an artifact, and where its files lie."""
        found = {name: path for name, path in _files(self.folder) if not self.only or name == self.file}
        meta: dict[str, Json] = {"format": 1, "engine": self.engine}
        if triton_model.is_one(self.folder / self.file):
            found, meta["python_backend"] = self._as_triton_has_it(found)
            meta["options"] = {"file": f"{self.version}/{self.file}"}
            names = {name: name for name in found}
        else:
            ours = _served(self.file)
            renamed = {self.file: ours, f"{Path(self.file).stem}.bin": f"{Path(ours).stem}.bin"}
            found = {name: path for name, path in found.items() if name in renamed or name not in renamed.values()}
            names = {name: renamed.get(name, name) for name in found}
        entries = [FileEntry(names[name], digest_file(path), path.stat().st_size) for name, path in found.items()]
        if self.labels:
            meta["labels"] = dict(self.labels)
        files = {names[name]: path for name, path in found.items()}
        return Artifact("engine", tuple(sorted(entries, key=lambda entry: entry.path)), meta), files

    def _as_triton_has_it(self, found: Mapping[str, Path]) -> tuple[dict[str, Path], Json]:
        """The version's files in a folder of its number, beside what all versions share; and how the model is told."""
        files = {f"{self.version}/{name}": path for name, path in found.items() if name != CONFIG}
        if self.model is not None:
            for name, path in _files(self.model):
                first, _, rest = name.partition("/")
                if name != CONFIG and not first.startswith(".") and not (rest and _is_number(first)):
                    files[name] = path
        config = triton_model.complete(self.config or _config(self.folder), self.name)
        return files, {"name": self.name, "version": self.version, "config": config}


def engine_of(file: str) -> str:
    """The engine that runs a file; DataError if none does."""
    suffix = Path(file).suffix
    for name, engine in ENGINES:
        if Path(name).suffix == suffix:
            return engine
    known = ", ".join(f"*{Path(name).suffix}" for name, _ in ENGINES)
    raise DataError("no engine runs such a file", place=file, cure=f"Models are {known}.")


def scan(folder: Path) -> list[Version]:
    """Every model of a repository, or the one whose folder it is, with the versions that are to be served.

    DataError where there is none.
    """
    if not folder.is_dir():
        raise NotFoundError("there is no such folder", place=str(folder))
    if is_model(folder):
        return versions_of(folder)
    found: list[Version] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            found += versions_of(path)
        elif path.suffix in {Path(name).suffix for name, _ in ENGINES}:
            found.append(one_file(path))
    if not found:
        raise DataError(
            "there is no model in it", place=str(folder), cure="A model is NAME/1/model.onnx, or NAME.onnx."
        )
    return found


def is_model(folder: Path) -> bool:
    """Whether a folder holds the versions of one model, and is no repository of many."""
    versions = [path for path in folder.iterdir() if _is_number(path.name) and path.is_dir()]
    known = (folder / CONFIG).is_file() or any((path / name).is_file() for path in versions for name, _ in ENGINES)
    return bool(versions) and known


def one_file(path: Path, name: str = "") -> Version:
    """A file that is a model of its own."""
    return Version(name or path.stem, "1", path.parent, path.name, engine_of(path.name) != "openvino", {})


def versions_of(folder: Path, config: Mapping[str, Json] | None = None) -> list[Version]:
    """The versions of a model's folder that its version policy serves (the newest, if it has none)."""
    told = config if config is not None else _config(folder)
    numbers = sorted(int(path.name) for path in folder.iterdir() if path.is_dir() and _is_number(path.name))
    labels = _labels(folder, told)
    try:
        chosen, options = _chosen(numbers, told.get("version_policy") or {}, folder), options_of(told)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        text = f"a value in its configuration is of another type than Triton's: {error}"
        raise DataError(text, place=str(folder / CONFIG)) from None
    found = []
    for number in chosen:
        inside = folder / str(number)
        file, engine = _model_in(inside, told)
        found.append(Version(folder.name, str(number), inside, file, False, options, labels, told, folder, engine))
    if not found:
        raise DataError("it has no version", place=str(folder), cure="Put the model into a folder 1 below it.")
    return found


def _model_in(folder: Path, config: Mapping[str, Json]) -> tuple[str, str]:
    """A version's model file, and what runs it: as its configuration says, else by the file that is there."""
    backend = str(config.get("backend") or PLATFORMS.get(str(config.get("platform")), ""))
    own = config.get("default_model_filename")
    usual = [(name, engine) for name, engine in BACKENDS.get(backend, ENGINES)]
    wanted = [(str(own), usual[0][1] if backend in BACKENDS else "")] if own else usual
    for name, engine in wanted:
        if "/" not in name and (folder / name).is_file():
            return name, engine or engine_of(name)
    names = " or ".join(name for name, _ in wanted)
    cure = f"Its configuration wants {names}." if own or backend in BACKENDS else f"It should have {names}."
    raise DataError("there is no model file in it", place=str(folder), cure=cure)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 19


def options_of(config: Mapping[str, Json]) -> dict[str, Json]:
    """What of a model's configuration counts here: batch.max and batch.wait_ms."""
    batch: dict[str, Json] = {}
    if "max_batch_size" in config:
        batch["max"] = min(max(1, int(config["max_batch_size"])), MOST_ROWS)
    delay = (config.get("dynamic_batching") or {}).get("max_queue_delay_microseconds")
    if delay is not None:
        batch["wait_ms"] = int(delay) / 1000
    return {"batch": batch} if batch else {}


def prepare(
    source: str | None, folder: Path, name: str, config: Mapping[str, Json] | None, files: Mapping[str, bytes]
) -> list[dict[str, Json]]:
    """The versions of a model to be opened, copied so that they stay as they are; a configuration and files
    (VERSION/NAME) that came with the request stand for what lies in the repository."""
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(name.encode()) > LONGEST:
        raise BadRequestError(f"failed to load '{name:.80}': no model can be called so")
    upload = folder / "uploads" / f"{os.getpid()}-{binascii.hexlify(os.urandom(6)).decode()}"
    try:
        place = _written(upload / name, files) if files else _known(source, name)
        versions = [one_file(place, name)] if place.is_file() else versions_of(place, config)
        return [told(version, folder) for version in versions]
    except (DataError, NotFoundError) as error:
        raise BadRequestError(f"failed to load '{name}': {error}") from None
    except OSError as error:
        raise _unwritable(name, error) from None
    finally:
        shutil.rmtree(upload, ignore_errors=True)


def told(version: Version, folder: Path) -> dict[str, Json]:
    """One version as replicas are told of it, with a copy of its files."""
    artifact, files = version.artifact()
    target = folder / MODELS / artifact.digest
    with contextlib.suppress(FileNotFoundError):
        os.utime(target)  # so that it isn't cleared away before it is asked for
    if target.is_dir() and not _is_whole(artifact, target):
        shutil.rmtree(target)  # somebody has changed it
    if not target.is_dir():
        aside = target.with_name(f".{artifact.digest}.{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        for name, path in files.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, aside / name)
        _check_copy(artifact, aside)
        os.utime(aside)
        try:
            aside.rename(target)
        except OSError:  # another replica was quicker
            shutil.rmtree(aside, ignore_errors=True)
    digests = {entry.path: entry.digest for entry in artifact.files}
    engine = {"digest": artifact.digest, "meta": dict(artifact.meta), "dir": str(target), "files": digests}
    return {"name": version.name, "version": version.version, "engine": engine, "options": dict(version.options)}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file below a folder; one that is elsewhere, and only linked to, counts as if it were here."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _is_whole(artifact: Artifact, folder: Path) -> bool:
    paths = [(folder / entry.path, entry.digest) for entry in artifact.files]
    return all(path.is_file() and digest_file(path) == digest for path, digest in paths)


def _check_copy(artifact: Artifact, folder: Path) -> None:
    """A file that was written to while it was copied is neither the old nor the new one."""
    for entry in artifact.files:
        if digest_file(folder / entry.path) != entry.digest:
            raise DataError("it changed while it was read", place=entry.path, cure="Load it again.")


def _chosen(numbers: Sequence[int], policy: Mapping[str, Json], folder: Path) -> list[int]:
    if "all" in policy:
        return list(numbers)
    if specific := (policy.get("specific") or {}).get("versions"):
        wanted = [int(number) for number in (specific if isinstance(specific, list) else [specific])]
        if missing := [number for number in wanted if number not in numbers]:
            raise DataError(f"version {missing[0]} isn't there, which its version_policy names", place=str(folder))
        return sorted(wanted)
    latest = int((policy.get("latest") or {}).get("num_versions", 1))
    return list(numbers)[-latest:]


def _config(folder: Path) -> Mapping[str, Json]:
    path = folder / CONFIG
    try:
        return pbtxt.parse(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise DataError(str(error), place=str(path)) from None


def _labels(folder: Path, config: Mapping[str, Json]) -> dict[str, Json]:
    """The lines of the files that outputs name as their labels, which lie beside config.pbtxt."""
    listed = config.get("output")
    found: dict[str, Json] = {}
    for output in listed if isinstance(listed, list) else [listed]:
        if not isinstance(output, dict) or not isinstance(name := output.get("label_filename"), str) or not name:
            continue
        path = folder / name
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            named = f"label_filename of output {output.get('name')!r}"
            raise DataError("there is no such file in the model's folder", place=f"{named}: {name}")
        found[str(output.get("name"))] = path.read_text(errors="replace").splitlines()
    return found


def _known(source: str | None, name: str) -> Path:
    folder = Path(source) if source else None
    if folder is None or "/" in name or name.startswith("."):
        raise NotFoundError("no model of this name is in the repository")
    for path in (folder / name, *(folder / f"{name}{Path(file).suffix}" for file, _ in ENGINES)):
        if path.exists():
            return path
    raise NotFoundError("no model of this name is in the repository")


def _written(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Files that came with the request."""
    for name, content in files.items():
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or len(path.parts) < 2:
            raise BadRequestError(f"load parameter 'file:{name}': VERSION/FILE is wanted")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def _unwritable(name: str, error: OSError) -> OnejobError:
    """What the system says of files that can't be as they are wanted, or of a disk that is full."""
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return BadRequestError(f"failed to load '{name}': such files can't be: {error.strerror}")
    kind = StorageFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
    return kind(f"failed to load '{name}': its files can't be copied: {error.strerror}", place="disk")


def _served(name: str) -> str:
    """The name that an engine looks for."""
    suffix = Path(name).suffix
    return next((file for file, _ in ENGINES if Path(file).suffix == suffix), name)
