"""Sources that are read from beginning to end: files, and iterables of examples."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """Files of examples, which can be divided among workers (`AutoShardPolicy.FILE`).

    Attributes:
        paths: the paths in reading order; converted to a tuple.
        read: a function that yields the examples of one file, in the same order every time.

    Raises:
        TypeError: paths is a single path, or read is not callable.
        ValueError: paths is empty.

    Examples:
        >>> import pathlib, tempfile
        >>> import fastdist as fd
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "numbers.txt")
        ...     _ = path.write_text("1 2 3")
        ...     files = fd.data.Files([path], lambda path: map(int, path.read_text().split()))
        ...     list(strategy.distribute_dataset(files, global_batch_size=2))
        [PerReplica(
          0: tensor([1, 2])), PerReplica(
          0: tensor([3]))]
    """

    paths: Sequence[Path]
    read: Callable[[Any], Iterable[Any]]

    def __post_init__(self) -> None:
        if isinstance(self.paths, (str, bytes, os.PathLike)):
            raise TypeError(f"Files needs a list of paths, got the single path {self.paths!r}")
        if not callable(self.read):
            raise TypeError(f"Files.read must be a function of a path, got {self.read!r}")
        object.__setattr__(self, "paths", tuple(self.paths))
        if not self.paths:
            raise ValueError("Files needs at least one path, got none")

    def peek(self) -> list[Any]:
        """Return a list with the first example of the files; empty if they have no examples."""
        examples = (example for path in self.paths for example in self.read(path))
        return list(itertools.islice(examples, 1))


class FileStream(IterableDataset[Any]):
    """The examples of files, one file after the other; loader processes divide the files."""

    def __init__(self, paths: Sequence[Path], read: Callable[[Any], Iterable[Any]]) -> None:
        self._paths = tuple(paths)
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = self._paths if info is None else self._paths[info.id :: info.num_workers]
        for path in mine:
            yield from self._read(path)


class IterableStream(IterableDataset[Any]):
    """Any iterable, read from its beginning in every epoch; an iterator lasts for one epoch."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self._is_iterator = isinstance(items, Iterator)
        self._used = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_iterator and self._used:
            raise ValueError(
                f"the source is an iterator ({type(self._items).__name__}), which is exhausted "
                "after one epoch; give an iterable that starts again at each iter()"
            )
        self._used = True
        return iter(self._items)

    def peek(self) -> list[Any]:
        """Return a list with the first item; empty for an empty iterable and for an iterator."""
        return [] if self._is_iterator else list(itertools.islice(self._items, 1))


def length_of(source: Any) -> int | None:
    """Return `len(source)`; None if the source has no length."""
    try:
        return len(source)
    except TypeError:
        return None
