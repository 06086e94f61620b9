"""Batches on their way from where they were read to the replicas' devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fastdist.data.batches import join
from fastdist.data.pipelines import Part
from fastdist.replicas.per_replica import leaves, map_structure


@dataclasses.dataclass(frozen=True, slots=True)
class Shipment:
    """A part whose batches are on the devices, or will be when the events have happened.

    Attributes:
        arrivals: per CUDA device, the event after the last copy to it.
    """

    part: Part
    arrivals: tuple[tuple[torch.device, torch.cuda.Event], ...] = ()


class BatchCopy(Protocol):
    """What brings parts to where the replicas compute."""

    @property
    def to_cpu_only(self) -> bool:
        """Whether that is CPU memory, so that there is nothing to do ahead of time."""

    def send(self, part: Part) -> Shipment:
        """Start the copies; from any thread."""

    def receive(self, shipment: Shipment) -> Part:
        """The part, ready for use by the calling thread."""

    def join(self, part: Part) -> Any:
        """What the training loop gets of a part."""


class DeviceCopy:
    """Copies the batch of each local replica to its device.

    To CUDA devices it copies from pinned memory on a stream of its own, so that the copy overlaps
    what the devices compute; `receive` makes the current streams wait for it, not the host.

    Args:
        devices: of the local replicas.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def to_cpu_only(self) -> bool:
        """Whether all devices are CPUs."""
        return all(device.type == "cpu" for device in self._devices)

    def send(self, part: Part) -> Shipment:
        """Start the copies; from any thread."""
        batches = tuple(
            self._send_batch(batch, device)
            for batch, device in zip(part.batches, self._devices, strict=True)
        )
        arrivals = tuple(
            (device, stream.record_event()) for device, stream in self._streams.items()
        )
        return Shipment(Part(batches, part.sizes, part.examples, part.token), arrivals)

    def receive(self, shipment: Shipment) -> Part:
        """The part, for use on the calling thread's current streams."""
        for device, arrival in shipment.arrivals:
            torch.cuda.current_stream(device).wait_event(arrival)
        if shipment.arrivals:
            for leaf in leaves(shipment.part.batches):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    # Its memory came from the copy's stream, and must not return to that early.
                    leaf.record_stream(torch.cuda.current_stream(leaf.device))
        return shipment.part

    def join(self, part: Part) -> Any:
        """One structure of per-replica values."""
        return join(part.batches, part.sizes, part.examples)

    def _send_batch(self, batch: Any, device: torch.device) -> Any:
        if device.type != "cuda":
            return map_structure(lambda leaf: _moved(leaf, device), batch)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What is on the device already may still be being written there.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return map_structure(lambda leaf: _moved_by_cuda(leaf, device), batch)


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        # All CPU devices ("cpu:0", "cpu:1") are one memory.
        here = leaf.device == device or leaf.device.type == device.type == "cpu"
        return leaf if here else leaf.to(device)
    # A batch of a class of the user's, as PyTorch Geometric has, knows how to move itself.
    move = getattr(leaf, "to", None)
    return move(device) if callable(move) else leaf


def _moved_by_cuda(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        source = leaf.pin_memory() if leaf.device.type == "cpu" else leaf
        return source.to(device, non_blocking=True)
    return _moved(leaf, device)
