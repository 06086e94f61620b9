"""The program that `fastdist.launch` runs in each process: calls the function."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from fastdist.cluster.launch import detect_launch, note_launch


def main(folder: Path, replica: int) -> int:
    """Call the function pickled in the folder; write its result or error there."""
    import cloudpickle  # type: ignore[import-untyped]

    launch = detect_launch()
    assert launch is not None
    note_launch(replace(launch, launcher="fastdist.launch"))
    sys.path[:] = json.loads((folder / "path").read_text())
    try:
        fn, args, kwargs = pickle.loads((folder / "call").read_bytes())
        result = fn(*args, **kwargs)
        if replica == 0:
            _leave(folder / "result.0", cloudpickle.dumps(result))
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(Exception):  # the error cannot be pickled
            _leave(folder / f"error.{replica}", cloudpickle.dumps(error.with_traceback(None)))
        return error.code if isinstance(error, SystemExit) and type(error.code) is int else 1
    return 0


def _leave(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(os.environ["RANK"])))
