"""Types of the collectives' arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, get_args

if TYPE_CHECKING:
    from typing import Required

Array = Any  # numpy.ndarray, torch.Tensor, anything with DLPack or the buffer protocol
Arrays = Array | Sequence[Array]
ReduceOp = Literal["sum", "mean", "prod", "min", "max", "and", "or", "xor"]
REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)
Compression = Literal["fp16", "bf16", "fp8"]
Ranks = Any  # a Communicator; its helpers, which it imports, cannot import its class


class Work(Protocol):
    """An asynchronous call.

    Examples:
        >>> import fastdist as fd, numpy as np
        >>> work = fd.init().all_reduce(np.array([1.0, 2.0]), async_op=True)
        >>> work.wait(timeout=30)
        array([1., 2.])
        >>> work.is_done()
        True
    """

    def is_done(self) -> bool:
        """Return True if the call has ended, successfully or not."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end of the call and return its result.

        Raises:
            CollectiveTimeoutError: `timeout` seconds have passed; the call continues.
            Exception: the call failed; its error is raised here.
        """


class DirectMessage(TypedDict, total=False):
    """Keywords of a call that returns its result."""

    stream: Any
    async_op: Literal[False]
    timeout: float | None


class AsyncMessage(TypedDict, total=False):
    """Keywords of a call that returns a `Work`."""

    stream: Any
    async_op: Required[Literal[True]]
    timeout: float | None


class Direct(DirectMessage, total=False):
    """Keywords of a call that returns its result, in `out` if that is given."""

    out: Arrays | None


class Async(AsyncMessage, total=False):
    """Keywords of a call that returns a `Work`, with the result in `out` if that is given."""

    out: Arrays | None


class DirectRows(Direct, total=False):
    """Keywords of a call that returns its result, whose parts may differ in size."""

    splits: Sequence[int] | None


class AsyncRows(Async, total=False):
    """Keywords of a call that returns a `Work`, whose parts may differ in size."""

    splits: Sequence[int] | None
