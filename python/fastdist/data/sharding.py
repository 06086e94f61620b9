"""Divides global batches among replicas, and sources among workers."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence


class AutoShardPolicy(enum.Enum):
    """The way workers share a source (tf.data.experimental.AutoShardPolicy).

    AUTO: FILE for `Files` with at least as many files as workers, else DATA.
    FILE: file i belongs to worker i mod num_workers, which makes its own batches from it.
    DATA: the source is cut into global batches, and each worker takes its part of every batch.
    OFF: each worker makes its own batches from the whole source.

    Under FILE and OFF a worker's batches have the size of its part of a global batch, so that a
    step takes a global batch of examples while every worker has data.

    Examples:
        >>> import fastdist as fd, torch
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> policy = fd.data.AutoShardPolicy.DATA
        >>> batches = strategy.distribute_dataset(
        ...     torch.arange(6), global_batch_size=4, auto_shard_policy=policy
        ... )
        >>> len(batches)
        2
    """

    AUTO = "auto"
    FILE = "file"
    DATA = "data"
    OFF = "off"


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """One worker's part of a batch."""

    start: int  # the worker's examples, as positions in the batch
    stop: int
    sizes: tuple[int, ...]  # of each local replica; they add up to stop - start
    examples: tuple[int, ...]  # of each replica among which the batch was divided

    @property
    def is_shared(self) -> bool:
        """True if other workers take parts of the batch too."""
        return len(self.sizes) < len(self.examples)


@functools.lru_cache
def own_part(num_replicas: int, local_replicas: Sequence[int], count: int) -> Cut:
    """Cut a batch of `count` examples into consecutive parts; return those of the local replicas.

    Sizes differ by at most one, and the first replicas get the larger parts: 7 examples on 4
    replicas are [2, 2, 2, 1].
    """
    size, larger = divmod(count, num_replicas)
    examples = (size + 1,) * larger + (size,) * (num_replicas - larger)
    start = sum(examples[: local_replicas[0]])
    sizes = examples[local_replicas[0] : local_replicas[-1] + 1]
    return Cut(start, start + sum(sizes), sizes, examples)


def resolve_policy(
    policy: AutoShardPolicy, num_files: int | None, num_workers: int
) -> AutoShardPolicy:
    """Replace AUTO by FILE or DATA, and check FILE; only `Files` have a number of files."""
    if policy is AutoShardPolicy.AUTO:
        enough = num_files is not None and num_files >= num_workers
        return AutoShardPolicy.FILE if enough else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE:
        if num_files is None:
            raise ValueError(
                "AutoShardPolicy.FILE needs a source of files: give fastdist.data.Files(paths, "
                "read), or use AutoShardPolicy.DATA"
            )
        if num_files < num_workers:
            raise ValueError(
                f"AutoShardPolicy.FILE needs a file for each worker, got {num_files} files for "
                f"{num_workers} workers; write more files, or use AutoShardPolicy.DATA"
            )
    return policy
