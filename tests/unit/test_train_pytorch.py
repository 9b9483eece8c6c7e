"""The PyTorch engine opens what training leaves, and gives what the module gives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from onejob.engines import open_model
from onejob.errors import DamagedError, InferenceError
from onejob.families.tabular import encode, model
from onejob.families.tabular.options import Options

COLUMNS: dict[str, Any] = {
    "late": np.array([True, False] * 4),
    "carrier": np.array(["AA", "UA"] * 4, dtype=object),
    "distance": np.arange(8.0),
}
ROLES = {"label": "late", "categories": ["carrier"], "numbers": ["distance"]}
OPTIONS = Options(hidden=[4], min_count=1).model_dump()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any], encode.Encoding, model.Tabular]:
    encoding = encode.fit(COLUMNS, ROLES, OPTIONS)
    module = model.build(encoding, OPTIONS, 3)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "encoding.json").write_text(json.dumps(encoding.to_json()))
    return tmp_path, {"format": 1, "family": "onejob.families.tabular", "model": OPTIONS}, encoding, module


def test_it_gives_what_the_module_gives(saved: Any):
    folder, meta, encoding, module = saved
    opened = open_model(folder, meta, threads=1)
    features = encoding.encode(COLUMNS)
    for array in features.values():
        array.flags.writeable = False  # as arrays over a request's bytes are
    expected = module.eval()(*(torch.tensor(features[spec.name]) for spec in encoding.features))[0]
    found = opened.infer(features)
    assert list(found) == ["logit"]
    np.testing.assert_array_equal(found["logit"], expected.detach().numpy())
    assert (opened.inputs, opened.outputs, opened.precision) == (encoding.features, encoding.outputs, "fp32")


def test_bad_features_are_an_inference_error(saved: Any):
    folder, meta, encoding, _ = saved
    opened = open_model(folder, meta, threads=1)
    features = encoding.encode(COLUMNS)
    with pytest.raises(InferenceError, match="'numbers' is missing"):
        opened.infer({"categories": features["categories"]})
    with pytest.raises(InferenceError):
        opened.infer({**features, "numbers": features["numbers"][:, :0]})


def test_weights_of_another_model_are_refused(saved: Any):
    folder, meta, _, _ = saved
    with pytest.raises(DamagedError, match="weights don't fit"):
        open_model(folder, {**meta, "model": {**OPTIONS, "hidden": [5]}}, threads=1)
