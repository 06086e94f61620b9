"""Values of all replicas of a mesh as one tensor, and batches on their way to become such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastdist.data.batches import join
from fastdist.data.devices import Shipment
from fastdist.data.pipelines import Part
from fastdist.replicas.per_replica import PerReplica, map_structure
from fastdist.tpu.mesh import Mesh


class Stacked:
    """What every replica of a mesh holds of one value; the content of a `PerReplica`.

    Args:
        tensor: shape (replicas, …), row i on device i.
        sizes: where axis 0 of each replica's value is filled up to a common length, how much of it
            each really has; None where nothing is filled up.
    """

    __slots__ = ("sizes", "tensor")

    def __init__(self, tensor: torch.Tensor, sizes: tuple[int, ...] | None = None) -> None:
        self.tensor = tensor
        self.sizes = sizes

    def __repr__(self) -> str:
        shape = tuple(self.tensor.shape[1:])
        filled = "" if self.sizes is None else f", of which {self.sizes} rows count"
        return f"<{self.tensor.shape[0]} tensors of shape {shape}, {self.tensor.dtype}{filled}>"

    def parts(self, rows: Sequence[torch.Tensor], replicas: range) -> list[torch.Tensor]:
        """These replicas' own values, of their rows."""
        if self.sizes is None:
            return list(rows)
        return [row[: self.sizes[i]] for row, i in zip(rows, replicas, strict=True)]


def is_stacked(value: Any) -> bool:
    """Whether a leaf is a per-replica value whose content is one `Stacked`."""
    return type(value) is PerReplica and type(value.values[0]) is Stacked


def stack(
    mesh: Mesh, value: PerReplica[Any], rows: int = 0, is_even: bool = False
) -> PerReplica[Any]:
    """Per-replica tensors, arrays or numbers, brought to the devices.

    Args:
        mesh: the replicas' devices.
        value: of this process's replicas; tensors that are a batch's (`examples`, of all replicas,
            is known) may differ in length.
        rows: fill them up to this length at least.
        is_even: nothing is to be filled up, in this batch or any other.

    Raises:
        ValueError: shapes or dtypes differ; on all devices runs one program.
        TypeError: the parts are of a kind that has no tensor.
    """
    if len(value.values) != len(mesh.local):
        raise ValueError(
            f"expected {len(mesh.local)} values, one for each replica here, got {len(value.values)}"
        )
    try:
        tensors = [torch.as_tensor(part) for part in value.values]
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = sorted({type(part).__name__ for part in value.values})
        raise TypeError(
            f"replicas of one XLA program have tensors and numbers of their own, got {kinds}"
        ) from error
    lengths = tuple(tensor.shape[0] if tensor.dim() else -1 for tensor in tensors)
    sizes = None
    if not is_even and value.examples is not None and lengths == mesh.own(value.examples):
        longest = max(rows, *value.examples)
        if any(length != longest for length in lengths):
            tensors = [_filled(tensor, longest, tensors) for tensor in tensors]
        sizes = value.examples
    kinds_of = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds_of) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"replicas' values differ in shape or dtype, {shapes}: one XLA program runs on all "
            "devices, where only batches of distribute_dataset may differ in length"
        )
    if mesh.size == 1 and sizes is None:
        return PerReplica((mesh.replicate(tensors[0]),), value.examples)
    return PerReplica((Stacked(mesh.stack(torch.stack(tensors)), sizes),), value.examples)


def _filled(tensor: torch.Tensor, length: int, everyone: Sequence[torch.Tensor]) -> torch.Tensor:
    """Examples, then copies of a real one: nothing that a model has not seen."""
    missing = length - tensor.shape[0]
    if not missing:
        return tensor
    model = next((one for one in (tensor, *everyone) if one.shape[0]), None)
    if model is None:
        filler = tensor.new_zeros((missing, *tensor.shape[1:]))
    else:
        filler = model[:1].expand(missing, *model.shape[1:])
    return torch.cat([tensor, filler])


class MeshCopy:
    """Brings the parts of one dataset to the devices of a mesh (a `fastdist.data` BatchCopy).

    All batches get the length of the longest part so far, so that one program serves them all.
    Where a mesh spans several processes they must agree on it, and what others have is known when
    a batch is given out: it is sent then. Otherwise the thread that reads ahead sends it.

    Args:
        mesh: of the replicas; each has a part of every batch.
        is_even: all replicas have as many examples in all batches, and nothing will be filled up.
    """

    to_cpu_only = False

    def __init__(self, mesh: Mesh, is_even: bool) -> None:
        self._mesh = mesh
        self._is_even = is_even
        self._is_ahead = mesh.is_whole
        self._rows = 0

    def send(self, part: Part) -> Shipment:
        """Fill up and copy; from any thread."""
        if not self._is_ahead:
            return Shipment(part)
        return Shipment(Part((self._placed(part),), part.sizes, part.examples, part.token))

    def receive(self, shipment: Shipment) -> Part:
        """The part: what uses it waits for the copies by itself."""
        return shipment.part

    def join(self, part: Part) -> Any:
        """A structure of per-replica values that are on the devices."""
        return part.batches[0] if self._is_ahead else self._placed(part)

    def _placed(self, part: Part) -> Any:
        if len({*part.examples}) > 1:
            self._is_even = False  # a process whose own data has ended before others'
        self._rows = max(self._rows, *part.examples)
        return map_structure(self._place, join(part.batches, part.sizes, part.examples))

    def _place(self, value: PerReplica[Any]) -> Any:
        if not isinstance(value.values[0], (torch.Tensor, np.ndarray)):
            return value
        return stack(self._mesh, value, 0 if self._is_even else self._rows, self._is_even)
