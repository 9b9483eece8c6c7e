"""The family that docs/families.md shows works as it stands there."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onejob.core.plan import Output, Upstream
from onejob.core.plugin import load
from onejob.train.spec import Spec, plan

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
COLUMNS: dict[str, Any] = {"late": np.array([True, False] * 6), "wind": np.linspace(0, 1, 12)}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """The page's code as files, each named by the comment on its first line."""
    package = tmp_path / "mymodels" / "wide"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    for names, code in re.findall(r"```python\n# ([^\n]+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        for name in names.split(" and "):
            (tmp_path / name).write_text(code)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mymodels"]:
        del sys.modules[name]


def test_it_plans_and_trains_a_step(project: Path, monkeypatch: pytest.MonkeyPatch):
    upstream = Upstream("j", str(project), 7, {"dataset": Output("data", "dataset")}, family="mymodels.wide")
    (step,) = plan(Spec(model={"scale": 2.0, "min_count": 1}), upstream).steps
    assert step.options["model"]["scale"] == 2.0
    monkeypatch.syspath_prepend(str(project))
    encoding = load("mymodels.wide.encode").fit(
        COLUMNS, {"label": "late", "categories": [], "numbers": ["wind"]}, step.options["model"]
    )
    module = load("mymodels.wide.model").build(encoding, step.options["model"], 3)
    features = [torch.from_numpy(encoding.encode(COLUMNS)[spec.name]) for spec in encoding.features]
    module.rows(7, 0, torch.arange(12))
    outputs = module(*features)
    losses = module.loss(outputs, torch.from_numpy(encoding.encode_label(COLUMNS["late"])))
    assert losses.shape == (12,)
    losses.sum().backward()
    assert module.weight.grad is not None
    arrays = {spec.name: out.detach().numpy() for spec, out in zip(encoding.outputs, outputs, strict=True)}
    assert "auc" in load("mymodels.wide.metrics").score(encoding.encode_label(COLUMNS["late"]), arrays)
