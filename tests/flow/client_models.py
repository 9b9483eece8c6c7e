"""A model repository for the tests of clients that no one here wrote: every datatype, text, classes, and a slow one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_models import Endpoint, endpoint, save_affine

from onejob.serve.repository import scan, told

NUMBERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64")
DATATYPES = (*NUMBERS, "BF16", "BOOL", "BYTES")

SAME = '''
"""What it is given, for each datatype."""
INPUTS = {{name: (name, [-1, 3]) for name in {datatypes}}}
OUTPUTS = {{f"{{name}}_too": (name, [-1, 3]) for name in {datatypes}}}


def infer(**arrays):
    return {{f"{{name}}_too": array for name, array in arrays.items()}}
'''

PAIR = '''
"""Two inputs, three outputs."""
import numpy as np

INPUTS = {"a": ("INT32", [-1, 2]), "b": ("FP32", [-1, 2])}
OUTPUTS = {"sum": ("FP32", [-1, 2]), "difference": ("FP32", [-1, 2]), "text": ("BYTES", [-1, 2])}


def infer(a, b):
    total = a.astype(np.float32) + b
    return {"sum": total, "difference": a - b, "text": np.char.mod("%g", total).astype(object)}
'''

TEXT = '''
"""Text in, text out, as a model that generates has it."""
INPUTS = {"text_input": ("BYTES", [1]), "repeat": ("INT32", [1])}
OUTPUTS = {"text_output": ("BYTES", [1]), "length": ("INT32", [1])}


def infer(text_input, repeat):
    text = text_input[0].decode() * int(repeat[0])
    if text == "FAIL":
        raise ValueError("this text fails")
    return {"text_output": [text.upper()], "length": [len(text)]}
'''

SLOW = '''
"""As slow as it is told."""
import time

INPUTS = {"seconds": ("FP32", [-1, 1])}
OUTPUTS = {"y": ("FP32", [-1, 1])}


def infer(seconds):
    time.sleep(float(seconds.max()))
    return seconds
'''

LABELS = ("ant", "bee", "cat", "dog")


def write_repository(folder: Path) -> Path:
    """`affine` (two versions), `classes` (affine, with labels), `same`, `pair`, `text` and `slow`."""
    for version, scale in ((1, 2.0), (2, 3.0)):
        save_affine(folder / "affine" / str(version), scale=scale)
    (folder / "affine" / "config.pbtxt").write_text("version_policy: { all { } }\nmax_batch_size: 8\n")
    save_affine(folder / "classes" / "1")
    (folder / "classes" / "labels.txt").write_text("\n".join(LABELS) + "\n")
    output = 'output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]'
    (folder / "classes" / "config.pbtxt").write_text(f'backend: "onnxruntime"\nmax_batch_size: 8\n{output}\n')
    sources = {"same": SAME.format(datatypes=DATATYPES), "pair": PAIR, "text": TEXT, "slow": SLOW}
    for name, source in sources.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(source)
    return folder


@contextlib.contextmanager
def served_repository(root: Path, **options: Any) -> Iterator[Endpoint]:
    """An endpoint that serves the models above, ready."""
    folder = write_repository(root / "models")
    with endpoint(root / "endpoint") as made:
        models = [told(version, made.folder) for version in scan(folder)]
        made.want(folder, name="many", models=models, repository=str(folder), **options)
        yield made.start().ready()


def program(client: str, name: str) -> Path:
    """A program of a client that lives in its own folder (tools/clients.py)."""
    found = Path(sys.prefix) / "clients" / client / name
    if not found.exists():
        why = f"the client {client} is not installed: python tools/clients.py {Path(sys.prefix) / 'clients'}"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    return found
