"""The errors of a PerReplica that is used where a replica's own value is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize(
    "use",
    [
        lambda value: F.mse_loss(torch.ones(3), value),
        lambda value: F.cross_entropy(torch.ones(3, 2), value),
        torch.nn.Linear(3, 1),
        torch.stack,
    ],
)
def test_torch_functions_say_how_to_pass_a_batch(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"PerReplica: .* strategy\.run\(.*args=\(batch,\)\)"):
        use(fd.PerReplica((torch.ones(3),)))


@pytest.mark.parametrize("use", [np.array, np.asarray, np.mean, torch.as_tensor, float, len])
def test_conversions_say_how_to_get_values(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"as a number or array: .*strategy\.local_results\(value"):
        use(fd.PerReplica((torch.ones(3),)))
