"""Per-replica values of a mesh as one stacked tensor, and the copying of batches to devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastdist.data.batches import join
from fastdist.data.devices import Shipment
from fastdist.data.pipelines import Part
from fastdist.replicas.per_replica import Origin, PerReplica, map_structure
from fastdist.tpu.mesh import Mesh


@dataclasses.dataclass(slots=True, eq=False)
class Stacked:
    """The values of all replicas of a mesh as one tensor; the content of a `PerReplica`.

    Attributes:
        tensor: shape (replicas, …), row i on device i.
        sizes: the unpadded length of axis 0 of each replica's value; None if values are not padded.
    """

    tensor: torch.Tensor
    sizes: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        shape = tuple(self.tensor.shape[1:])
        padded = "" if self.sizes is None else f", of which {self.sizes} rows count"
        return f"<{self.tensor.shape[0]} tensors of shape {shape}, {self.tensor.dtype}{padded}>"


def is_stacked(value: Any) -> bool:
    """Return True if a leaf is a per-replica value whose content is a `Stacked`."""
    return type(value) is PerReplica and type(value.values[0]) is Stacked


def stack(
    mesh: Mesh, value: PerReplica[Any], rows: int = 0, is_even: bool = False
) -> PerReplica[Any]:
    """Copy per-replica tensors, arrays or numbers to the devices.

    Args:
        value: values of this process's replicas. Tensors of a batch (with `examples` of all
            replicas) may differ in length and are padded.
        rows: the least length to pad to.
        is_even: True to pad neither this batch nor any other.
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
            f"replicas of one XLA program take tensors and numbers of their own, got {kinds}"
        ) from error
    lengths = tuple(tensor.shape[0] if tensor.dim() else -1 for tensor in tensors)
    sizes = None
    if not is_even and value.examples is not None and lengths == mesh.own(value.examples):
        longest = max(rows, *value.examples)
        if any(length != longest for length in lengths):
            tensors = [_padded_to(tensor, longest, tensors) for tensor in tensors]
        sizes = value.examples
    kinds_of = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds_of) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"replicas' values differ in shape or dtype, {shapes}: one XLA program runs on all "
            "devices, and only batches of distribute_dataset may differ in length"
        )
    if mesh.size == 1 and sizes is None:
        return PerReplica((mesh.replicate(tensors[0]),), value.examples)
    return PerReplica((Stacked(mesh.stack(torch.stack(tensors)), sizes),), value.examples)


def _padded_to(tensor: torch.Tensor, length: int, everyone: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pad with copies of an example, so that a model sees no artificial values."""
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
    """Copies the parts of a dataset's batches to the devices (in place of `DeviceCopy`).

    Batches are padded to the length of the longest part so far, so that one program serves all of
    them. With one process, the thread that reads ahead copies a batch. With several processes,
    which must agree on the length, a batch is copied when it is given out, since the lengths of
    other processes are known only then.

    Args:
        is_even: True if all replicas have equally many examples in all batches: no padding.
    """

    to_cpu_only = False

    def __init__(self, mesh: Mesh, is_even: bool) -> None:
        self._mesh = mesh
        self._is_even = is_even
        self._is_ahead = mesh.is_whole
        self._rows = 0

    def send(self, part: Part) -> Shipment:
        """Pad and copy a part. Thread-safe."""
        if not self._is_ahead:
            return Shipment(part)
        return Shipment(dataclasses.replace(part, batches=(self._placed(part),)))

    def receive(self, shipment: Shipment) -> Part:
        """Return the part; operations that use it wait for the copies."""
        return shipment.part

    def join(self, part: Part, origin: Origin | None) -> Any:
        """Return the batch as a structure of per-replica values on the devices."""
        return part.batches[0] if self._is_ahead else self._placed(part)

    def _placed(self, part: Part) -> Any:
        if len({*part.examples}) > 1:
            self._is_even = False  # a process whose own data ended before other processes'
        self._rows = max(self._rows, *part.examples)
        return map_structure(self._place, join(part.batches, part.sizes, part.examples))

    def _place(self, value: PerReplica[Any]) -> Any:
        if not isinstance(value.values[0], (torch.Tensor, np.ndarray)):
            return value
        return stack(self._mesh, value, 0 if self._is_even else self._rows, self._is_even)
