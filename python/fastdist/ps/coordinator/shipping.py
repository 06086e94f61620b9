"""Functions, and what they refer to, on their way to workers: pickled once, known by numbers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from fastdist.errors import FastdistError
from fastdist.ps.coordinator.unpicklable import (
    parts_of_arguments,
    parts_of_function,
    pickled_or_named,
)

Token = tuple[int, int | None]
"""The number of a definition, and of one of its parts; None: the whole."""
_NOTHING: Mapping[int, tuple[Any, ...]] = {}
Resolve = Callable[[Token], Any]


class Definition:
    """Something that workers keep.

    Attributes:
        number: how calls refer to it.
        blob: a pickle of a callable that makes it, without arguments.
        needs: the definitions that it refers to.
        has_state: whether it, or one of those, has values that workers share.
    """

    def __init__(
        self, number: int, blob: bytes, needs: Sequence[Definition], is_state: bool = False
    ) -> None:
        self.number = number
        self.blob = blob
        self.needs = tuple(needs)
        self.has_state: bool = is_state or any(needed.has_state for needed in needs)


class Definitions:
    """All that calls refer to; what nobody refers to any more is forgotten.

    Attributes:
        forgotten: numbers that workers need not keep; whoever tells them takes them away.
    """

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self._numbers = itertools.count(1)
        self._named: dict[int, tuple[Token, Definition]] = {}  # by id
        self._of_function: weakref.WeakKeyDictionary[Any, Definition] = weakref.WeakKeyDictionary()
        self._of_digest: weakref.WeakValueDictionary[bytes, Definition] = (
            weakref.WeakValueDictionary()
        )

    def name(self, thing: Any, definition: Definition, part: int | None = None) -> None:
        """From now on `thing` is not pickled: it is this definition, or a part of it."""
        self._named[id(thing)] = (definition.number, part), definition
        weakref.finalize(thing, self._named.pop, id(thing), None)

    def define(
        self,
        make: Callable[[], Any],
        *,
        instead: Mapping[int, tuple[Any, ...]] = _NOTHING,
        is_state: bool = False,
    ) -> Definition:
        """What `make` gives on each worker.

        Args:
            make: is pickled, and called without arguments there.
            instead: by ids of objects in it, how else to make them, as `__reduce__` says it.
            is_state: whether it has values that workers share.
        """
        blob, needs = self.dumps(make, instead)
        return self._new(blob, needs, is_state)

    def function(self, fn: Callable[..., Any]) -> Definition:
        """A function, with the values that it closes over now.

        Raises:
            TypeError: it cannot be pickled; names what it closes over, and is why.
        """
        try:
            known = self._of_function.get(fn)
        except TypeError:  # cannot be hashed, or referred to weakly
            known = None
        if known is not None:
            return known
        blob, needs = pickled_or_named(
            self.dumps,
            functools.partial(_same, fn),
            getattr(fn, "__qualname__", type(fn).__name__),
            lambda: parts_of_function(fn),
        )
        digest = hashlib.sha256(blob).digest()
        definition = self._of_digest.get(digest)
        if definition is None:
            definition = self._of_digest[digest] = self._new(blob, needs)
        if getattr(fn, "__self__", None) is None:  # a bound method lives for this call
            with contextlib.suppress(TypeError):
                self._of_function[fn] = definition
        return definition

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bytes, tuple[Definition, ...]]:
        """As `dumps`, of the arguments of a call.

        Raises:
            TypeError: one cannot be pickled; names it.
        """
        pickled: tuple[bytes, tuple[Definition, ...]] = pickled_or_named(
            self.dumps, (args, kwargs), "a call", lambda: parts_of_arguments(args, kwargs)
        )
        return pickled

    def dumps(
        self, thing: Any, instead: Mapping[int, tuple[Any, ...]] = _NOTHING
    ) -> tuple[bytes, tuple[Definition, ...]]:
        """A pickle, and the definitions it refers to.

        Raises:
            Exception: what pickling raises.
        """
        file = io.BytesIO()
        pickler = _Pickler(file, self._named, instead)
        pickler.dump(thing)
        return file.getvalue(), tuple(pickler.needs.values())

    def _new(self, blob: bytes, needs: Sequence[Definition], is_state: bool = False) -> Definition:
        definition = Definition(next(self._numbers), blob, needs, is_state)
        weakref.finalize(definition, self.forgotten.append, definition.number)
        return definition


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        named: Mapping[int, tuple[Token, Definition]],
        instead: Mapping[int, tuple[Any, ...]],
    ) -> None:
        super().__init__(file)
        self._named = named
        self._instead = instead
        self.needs: dict[int, Definition] = {}

    def persistent_id(self, thing: Any) -> Token | None:
        known = self._named.get(id(thing))
        if known is None:
            return None
        token, definition = known
        self.needs[definition.number] = definition
        return token

    def reducer_override(self, thing: Any) -> Any:
        known = self._instead.get(id(thing))
        return super().reducer_override(thing) if known is None else known


class _Unpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, resolve: Resolve) -> None:
        super().__init__(io.BytesIO(blob))
        self._resolve = resolve

    def persistent_load(self, token: Token) -> Any:
        return self._resolve(token)


def loads(blob: bytes, resolve: Resolve) -> Any:
    """What `Definitions.dumps` pickled; `resolve` finds what it refers to."""
    return _Unpickler(blob, resolve).load()


def _same(thing: Any) -> Any:
    return thing


class Library:
    """The definitions that a worker has got, each made when it is first needed.

    Args:
        parts: the parts of a definition that has such, by what it made.
    """

    def __init__(self, parts: Callable[[Any], Sequence[Any]]) -> None:
        self._parts = parts
        self._blobs: dict[int, bytes] = {}
        self._made: dict[int, Any] = {}
        self._parts_of: dict[int, Sequence[Any]] = {}

    def add(self, number: int, blob: bytes) -> None:
        """Keep a definition; one that is known stays as it is."""
        self._blobs.setdefault(number, blob)

    def forget(self, number: int) -> None:
        """Drop a definition."""
        self._blobs.pop(number, None)
        self._made.pop(number, None)
        self._parts_of.pop(number, None)

    def clear(self) -> None:
        """Drop all."""
        self._blobs.clear()
        self._made.clear()
        self._parts_of.clear()

    def get(self, token: Token) -> Any:
        """What a token stands for."""
        number, part = token
        if number not in self._made:
            if number not in self._blobs:
                raise FastdistError(f"definition {number} has not come to this worker")
            self._made[number] = self.loads(self._blobs[number])()
        if part is None:
            return self._made[number]
        if number not in self._parts_of:
            self._parts_of[number] = self._parts(self._made[number])
        return self._parts_of[number][part]

    def loads(self, blob: bytes) -> Any:
        """A pickle that refers to definitions."""
        return loads(blob, self.get)
