"""Copies batches from the memory they were read into to the replicas' devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fastdist.data.batches import join
from fastdist.data.pipelines import Part
from fastdist.replicas.per_replica import Origin, leaves, map_structure


@dataclasses.dataclass(frozen=True, slots=True)
class Shipment:
    """A part whose batches are on the devices once the events have completed."""

    part: Part
    # Per CUDA device, the event after the last copy to it.
    arrivals: tuple[tuple[torch.device, torch.cuda.Event], ...] = ()


class DeviceCopy:
    """Copies the batch of each local replica to its device.

    Copies to CUDA devices use pinned memory and a separate stream, so that they overlap with
    computation; `receive` makes the current streams wait for the copy, not the host. With
    `to_cpu_only` copying ahead saves nothing.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self.to_cpu_only = all(device.type == "cpu" for device in devices)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def send(self, part: Part) -> Shipment:
        """Start the copies. Any thread may call."""
        batches = tuple(
            self._send_batch(batch, device)
            for batch, device in zip(part.batches, self._devices, strict=True)
        )
        arrivals = tuple(
            (device, stream.record_event()) for device, stream in self._streams.items()
        )
        return Shipment(dataclasses.replace(part, batches=batches), arrivals)

    def receive(self, shipment: Shipment) -> Part:
        """Return the part, for use on the calling thread's current streams."""
        for device, arrival in shipment.arrivals:
            torch.cuda.current_stream(device).wait_event(arrival)
        if shipment.arrivals:
            for leaf in leaves(shipment.part.batches):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    # Keep the copy's stream from reusing the memory while the leaf is in use.
                    leaf.record_stream(torch.cuda.current_stream(leaf.device))
        return shipment.part

    def join(self, part: Part, origin: Origin | None) -> Any:
        """Join the batches into one structure of per-replica values."""
        return join(part.batches, part.sizes, part.examples, origin)

    def _send_batch(self, batch: Any, device: torch.device) -> Any:
        if device.type != "cuda":
            return map_structure(lambda leaf: _moved(leaf, device), batch)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Kernels on the current stream may still be writing the source.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return map_structure(lambda leaf: _moved_by_cuda(leaf, device), batch)


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        # All CPU devices ("cpu:0", "cpu:1") share one memory.
        here = leaf.device == device or leaf.device.type == device.type == "cpu"
        return leaf if here else leaf.to(device)
    # Batch classes of libraries such as PyTorch Geometric have their own `to`.
    move = getattr(leaf, "to", None)
    return move(device) if callable(move) else leaf


def _moved_by_cuda(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        source = leaf.pin_memory() if leaf.device.type == "cpu" else leaf
        return source.to(device, non_blocking=True)
    return _moved(leaf, device)
