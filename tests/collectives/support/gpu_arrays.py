"""Arrays for tests of the engine for GPUs: torch's on a real GPU, or virtual arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from reference import numpy_dtype


class Graph(ABC):
    """A CUDA graph, or a virtual graph."""

    @abstractmethod
    def capture(self) -> AbstractContextManager[Any]: ...
    @abstractmethod
    def launch(self) -> None:
        """Launch on the current stream."""


class GpuArrays(ABC):
    """The functions of an array library that the tests need, on the thread's current stream."""

    are_virtual = False

    @abstractmethod
    def device_count(self) -> int: ...
    @abstractmethod
    def set_device(self, device: int) -> None: ...
    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait for the current device."""

    @abstractmethod
    def bytes_in_use(self, device: int) -> int: ...

    @abstractmethod
    def array(self, values: Any) -> Any:
        """Make a one-dimensional copy of a numpy array."""

    @abstractmethod
    def numpy(self, array: Any, dtype: str) -> Any:
        """Copy to a numpy array of this dtype."""

    @abstractmethod
    def view(self, memory: Any, dtype: str) -> Any:
        """View an object with a CUDA array interface as an array of this dtype."""

    @abstractmethod
    def fill(self, array: Any, value: float) -> None: ...
    @abstractmethod
    def copy(self, to: Any, source: Any) -> None: ...
    @abstractmethod
    def in_memory_of_host(self) -> Any: ...

    @abstractmethod
    def current_stream(self) -> int: ...
    @abstractmethod
    def new_stream(self) -> Any: ...
    @abstractmethod
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]: ...
    @abstractmethod
    def graph(self) -> Graph: ...

    def full(self, size: int, value: float, dtype: str = "float32") -> Any:
        return self.array(np.full(size, value, numpy_dtype(dtype)))

    def is_full(self, array: Any, value: float, dtype: str = "float32") -> bool:
        return bool((self.numpy(array, dtype) == numpy_dtype(dtype).type(value)).all())


class TorchGraph(Graph):
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._torch.cuda.graph(self._graph)
        return context

    def launch(self) -> None:
        self._graph.replay()


class TorchArrays(GpuArrays):
    def __init__(self) -> None:
        import torch

        self._torch = torch

    def device_count(self) -> int:
        return int(self._torch.cuda.device_count())

    def set_device(self, device: int) -> None:
        self._torch.cuda.set_device(device)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def bytes_in_use(self, device: int) -> int:
        free, total = self._torch.cuda.mem_get_info(device)
        return int(total - free)

    def array(self, values: Any) -> Any:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1).copy()
        dtype = getattr(self._torch, values.dtype.name)
        if raw.size == 0:  # which no view takes
            return self._torch.empty(0, dtype=dtype, device="cuda")
        return self._torch.from_numpy(raw).cuda().view(dtype)

    def numpy(self, array: Any, dtype: str) -> Any:
        if array.numel() == 0:
            return np.empty(0, numpy_dtype(dtype))
        raw = array.view(self._torch.uint8).cpu().numpy()
        return raw.view(numpy_dtype(dtype))

    def view(self, memory: Any, dtype: str) -> Any:
        tensor = self._torch.as_tensor(memory, device="cuda")
        return tensor.view(getattr(self._torch, dtype))

    def fill(self, array: Any, value: float) -> None:
        array.fill_(value)

    def copy(self, to: Any, source: Any) -> None:
        to.copy_(source)

    def in_memory_of_host(self) -> Any:
        return self._torch.ones(3)

    def current_stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def new_stream(self) -> Any:
        return self._torch.cuda.Stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._torch.cuda.stream(stream)
        return context

    def graph(self) -> Graph:
        return TorchGraph(self._torch)


class VirtualArrays(GpuArrays):
    are_virtual = True

    def __init__(self) -> None:
        import virtual_arrays

        self._virtual = virtual_arrays

    def device_count(self) -> int:
        return self._virtual.device_count()

    def set_device(self, device: int) -> None:
        self._virtual.set_device(device)

    def synchronize(self) -> None:
        self._virtual.synchronize()

    def array(self, values: Any) -> Any:
        return self._virtual.array(np.asarray(values).reshape(-1))

    def numpy(self, array: Any, dtype: str) -> Any:
        assert array.dtype == numpy_dtype(dtype)
        return array.numpy()

    def view(self, memory: Any, dtype: str) -> Any:
        return self._virtual.view(memory, dtype)

    def fill(self, array: Any, value: float) -> None:
        array.fill(value)

    def copy(self, to: Any, source: Any) -> None:
        to.copy_from(source)

    def in_memory_of_host(self) -> Any:
        return memoryview(bytes(3))

    def current_stream(self) -> int:
        return self._virtual.current_stream()

    def new_stream(self) -> Any:
        return self._virtual.Stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._virtual.use_stream(stream)

    def graph(self) -> Graph:
        graph: Graph = self._virtual.Graph()
        return graph

    def bytes_in_use(self, device: int) -> int:
        return self._virtual.bytes_in_use(device)


def choose() -> GpuArrays:
    """Choose virtual arrays if the module was built on virtual GPUs, else torch's."""
    from virtual_arrays import are_built

    return VirtualArrays() if are_built() else TorchArrays()
