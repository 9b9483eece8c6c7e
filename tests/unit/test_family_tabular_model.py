"""The tabular module: counters instead of generators, and a forward that can be exported."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onejob.families.tabular import encode, model
from onejob.families.tabular.options import Options

OPTIONS = {"hidden": [8, 4], "dropout": 0.4, "min_count": 1}
COLUMNS: dict[str, Any] = {
    "late": np.array([True, False] * 10),
    "carrier": np.array(["AA", "UA", "B6", "DL"] * 5, dtype=object),
    "origin": np.array(["JFK", "LGA"] * 10, dtype=object),
    "distance": np.linspace(100, 900, 20),
}
KINDS = {"both": (["carrier", "origin"], ["distance"]), "categories": (["carrier"], []), "numbers": ([], ["distance"])}


def make(kind: str = "both", seed: int = 1, **changes: Any) -> tuple[encode.Encoding, model.Tabular]:
    categories, numbers = KINDS[kind]
    options = Options(**{**OPTIONS, **changes.pop("options", {})}).model_dump()
    roles = {"label": "late", "categories": categories, "numbers": numbers}
    encoding = encode.fit({**COLUMNS, **changes}, roles, options)
    return encoding, model.build(encoding, options, seed)


def features(encoding: encode.Encoding) -> list[torch.Tensor]:
    found = encoding.encode(COLUMNS)
    return [torch.from_numpy(found[spec.name]) for spec in encoding.features]


def test_parameters_depend_on_the_seed_alone():
    torch.manual_seed(1)
    _, first = make(seed=5)
    torch.manual_seed(2)
    _, again = make(seed=5)
    _, other = make(seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_a_value_never_seen_starts_as_nothing():
    _, module = make()
    assert all((embedding.weight[0] == 0).all() and (embedding.weight[1] != 0).any() for embedding in module.embeddings)


@given(st.integers(0, 20), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_a_row_is_dropped_out_alike_whatever_rows_it_is_with(cut: int, seed: int, step: int):
    encoding, module = make()
    rows, given_features = torch.arange(100, 120), features(encoding)
    module.train()
    module.rows(seed, step, rows)
    together = module(*given_features)[0]
    parts = []
    for part in (slice(0, cut), slice(cut, 20)):
        module.rows(seed, step, rows[part])
        parts.append(module(*(feature[part] for feature in given_features))[0])
    torch.testing.assert_close(torch.cat(parts), together, rtol=0, atol=1e-6)


def test_masks_differ_by_seed_step_layer_and_row_and_drop_the_share_that_was_asked_for():
    def mask(seed: int, step: int, layer: int, start: int = 0) -> torch.Tensor:
        drop = model.Dropout(0.3, layer)
        drop.key(seed, step, torch.arange(start, start + 2000))
        return drop(torch.ones(2000, 50))

    first = mask(1, 2, 0)
    kept = (first > 0).float()
    assert torch.equal(first, mask(1, 2, 0))
    assert abs(kept.mean().item() - 0.7) < 0.01
    assert abs(first.mean().item() - 1.0) < 0.02
    for other in (mask(2, 2, 0), mask(1, 3, 0), mask(1, 2, 1), mask(1, 2, 0, 5000)):
        agree = ((other > 0).float() == kept).float().mean().item()
        assert abs(agree - (0.7**2 + 0.3**2)) < 0.01  # as independent masks do
    units = np.corrcoef(kept.numpy().T) - np.eye(50)
    assert np.abs(units).max() < 0.12  # five standard deviations of 2,000 rows


def test_there_is_no_dropout_in_eval_mode():
    encoding, module = make()
    module.eval()
    assert torch.equal(module(*features(encoding))[0], module(*features(encoding))[0])
    module.train()
    module.rows(1, 1, torch.arange(20))
    assert not torch.equal(module(*features(encoding))[0], module.eval()(*features(encoding))[0])


@pytest.mark.parametrize(
    ("label", "width"),
    [
        (np.array([True, False] * 10), 1),
        (np.array(["a", "b", "c", "d"] * 5, dtype=object), 4),
        (np.linspace(5, 9, 20), 1),
    ],
)
def test_each_task_has_one_loss_a_row_and_learns(label: Any, width: int):
    encoding, module = make(late=label, options={"dropout": 0.0})
    truth = torch.from_numpy(encoding.encode_label(label))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    means = []
    for _ in range(100):
        outputs = module(*features(encoding))
        losses = module.loss(outputs, truth)
        assert outputs[0].shape == (20, width)
        assert losses.shape == (20,)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        means.append(losses.mean().item())
    assert means[-1] < 0.7 * means[0]


def test_a_regression_gives_values_in_units_of_the_label():
    encoding, module = make(late=np.linspace(1000, 1100, 20))
    values = module.eval()(*features(encoding))[0]
    assert ((values > 500) & (values < 1600)).all()
    far = module.loss((torch.full((1, 1), 1050.0 + encoding.label.std),), torch.tensor([1050.0]))
    assert far.item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_can_be_exported_with_any_batch(kind: str):
    encoding, module = make(kind)
    given_features = features(encoding)
    few = tuple(feature[:3] for feature in given_features)
    shapes = tuple({0: torch.export.Dim("batch")} for _ in few)
    exported = torch.export.export(module.eval(), few, dynamic_shapes=shapes).module()
    torch.testing.assert_close(exported(*given_features)[0], module(*given_features)[0])
