"""Finding libnccl at run time. The tests need a libnccl, but no GPU."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastdist._core as _core
import pytest
from fastdist.cli.doctor.report import build_section
from fastdist.collectives.engines import nccl_library
from paths import ROOT

# The program of a test's process. Each load needs a process, since a loaded library stays loaded.
LOAD = """
import ctypes, json, sys
import fastdist._core as _core
for path in json.loads(sys.argv[1]): ctypes.CDLL(path)
try:
    library = _core.load_nccl(json.loads(sys.argv[2]))
    again = _core.load_nccl([])
    answer = dict(path=library.path, version=library.version, text=library.version_text,
                  same=again.path == library.path)
except Exception as error:
    answer = dict(error=type(error).__name__, message=str(error))
print(json.dumps(answer))
"""


def load(*candidates: Path | str, loaded: tuple[Path, ...] = ()) -> dict[str, Any]:
    arguments = [json.dumps([str(path) for path in paths]) for paths in (loaded, candidates)]
    command = [sys.executable, "-c", LOAD, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture(scope="module")
def nccl() -> Path:
    """The libnccl of NVIDIA's package."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if path.exists():
            return path
    pytest.skip("needs the package nvidia-nccl-cu12 or nvidia-nccl-cu13")


def test_the_candidate_is_loaded(nccl: Path) -> None:
    found = load("/nowhere/libnccl.so.2", nccl)
    assert found["path"] == str(nccl)
    assert found["version"] >= 22703
    assert found["text"].startswith("2.")
    assert found["same"]


def test_our_declarations_are_those_of_the_header(nccl: Path) -> None:
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    folders += [found for folder in packages for found in folder.glob("cu*/include")]
    needed = ("cuda_runtime.h", "crt/host_config.h")  # the second is in another package of pip's
    cuda = [folder for folder in folders if all((folder / name).exists() for name in needed)]
    compiler = shutil.which("c++")
    if not cuda or compiler is None:
        pytest.skip("needs a C++ compiler and the headers of CUDA")
    includes = [f"-I{ROOT}/csrc", f"-I{nccl.parents[1]}/include", "-isystem", str(cuda[0])]
    command = [compiler, "-std=c++20", "-fsyntax-only", *includes]
    subprocess.run([*command, ROOT / "tests/cpp/nccl_header.cpp"], check=True)


def test_the_package_is_found_without_an_import(nccl: Path) -> None:
    assert str(nccl) in nccl_library.candidates()


def test_doctor_says_which_library_and_why_no_gpu() -> None:
    facts = {fact.key: fact for fact in build_section()}
    if not _core.cuda_is_built():
        assert "FASTDIST_CUDA=on" in facts["cuda"].text
        assert "nccl" not in facts
        return
    assert "built with CUDA" in facts["cuda"].text
    assert _core.why_no_cuda() in facts["cuda"].text
    nccl = facts["nccl"]
    assert ("was not found" in nccl.text) == (nccl.value is None)
    assert nccl.value is None or nccl.text.startswith("2.")


def test_what_the_process_has_loaded_comes_first(nccl: Path, tmp_path: Path) -> None:
    """torch, for example, loads its own libnccl; fastdist loads no second one."""
    found = load(tmp_path / "libnccl.so.2", loaded=(nccl,))
    assert found["path"] == str(nccl)


def test_of_two_libraries_in_one_process_one_is_used(nccl: Path, tmp_path: Path) -> None:
    copy = tmp_path / "libnccl.so.2"
    copy.write_bytes(nccl.read_bytes())
    found = load("/nowhere/libnccl.so.2", loaded=(nccl, copy))
    assert found["path"] in (str(nccl), str(copy))
    assert found["same"]


def test_an_absent_library_is_said_how_to_get(tmp_path: Path) -> None:
    found = load(tmp_path / "libnccl.so.2")
    if "path" in found:
        pytest.skip("the system has a libnccl")
    assert found["error"] == "UnsupportedError"
    assert "pip install nvidia-nccl-cu13" in found["message"]
    assert str(tmp_path) in found["message"]


def test_a_library_that_is_no_nccl_is_named(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int something(void) { return 0; }\n")
    library = tmp_path / "libnccl.so.2"
    command = ["cc", "-shared", "-o", library, source]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a C compiler: {error}")
    found = load(library)
    assert found["error"] == "UnsupportedError"
    assert f"{library} is not an NCCL library that fastdist can use" in found["message"]


def test_calls_need_a_library_and_a_gpu() -> None:
    script = (
        "from fastdist import _core, errors\n"
        "try: _core.new_nccl_id()\n"
        "except errors.FastdistError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = "has not been loaded" if _core.cuda_is_built() else "FASTDIST_CUDA=on"
    assert expected in result.stdout


@pytest.mark.skipif(_core.why_no_cuda() == "", reason="this machine has a GPU")
@pytest.mark.skipif(not _core.cuda_is_built(), reason="this build has no CUDA")
def test_connecting_without_a_gpu_says_why() -> None:
    with pytest.raises(Exception, match=r"CUDA driver|no GPU") as caught:
        _core.NcclCommunicator.connect(bytes(128), 0, 1, 0, None, 10.0)
    assert type(caught.value).__name__ == "UnsupportedError"


def test_ranks_that_share_a_gpu_need_settings() -> None:
    assert _core.nccl_settings_for_sharing(23003, 1)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    older = [_core.nccl_settings_for_sharing(22807, rank)["NCCL_HOSTID"] for rank in (0, 1)]
    assert older[0] != older[1]
