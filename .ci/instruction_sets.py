#!/usr/bin/env python3
"""Refuses a wheel whose module needs a newer processor than the oldest one it is meant for.

Loops for AVX2 and AVX-512 are chosen at run time; their files are called kernels_avx*.cpp. All
other code must run everywhere, which a flag such as -march=native breaks unnoticed. Fused
operations are refused everywhere, so that all processors give the same bits.

    .ci/instruction_sets.py WHEEL   # reads the linker's map in the build folder of the wheel

The module has no symbols, so the map that the linker wrote says which file an address is from.
"""

import bisect
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CHOSEN_AT_RUN_TIME = re.compile(r"kernels_avx\w+\.cpp\.o\b")
# x86: AVX of any kind, whose names begin with v, and the integer extensions of x86-64-v3 that
# compilers use. Arm: SVE, by its registers.
NEWER = re.compile(
    r"^(v(?!err|erw|m[a-z]*$)\w+|andn|bextr|bls\w+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx)\b"
    r"|\b[zp]\d+\.[bhsdq]\b"
)
# A product and a sum that are rounded once: the bits of a result would depend on the processor.
FUSED = re.compile(r"^vfn?m(add|sub)")
# A section of an input file: its name (on a line of its own if long), address, size and file.
SECTION = re.compile(r"^ \.text\S*\s+0x([0-9a-f]+)\s+0x([0-9a-f]+) (\S+)$", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(.+)$", re.MULTILINE)


def main(wheel: Path) -> None:
    """Print what was found; exit with 1 if it must not be there."""
    tag = wheel.name.split("-", 2)[2].removesuffix(".whl")
    (link_map,) = Path("build").glob(f"{tag}/**/_core.map")
    sections = sorted(
        (int(start, 16), int(size, 16), file)
        for start, size, file in SECTION.findall(link_map.read_text())
        if int(start, 16) and int(size, 16)
    )
    starts = [start for start, _, _ in sections]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        (module,) = (name for name in archive.namelist() if re.search(r"/_core\.[^/]*so$", name))
        code = subprocess.run(
            ["objdump", "-d", "-j", ".text", "--no-show-raw-insn", archive.extract(module, folder)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    chosen, wrong = 0, {}
    for address, instruction in INSTRUCTION.findall(code):
        if not NEWER.search(instruction):
            continue
        is_fused = FUSED.match(instruction) is not None
        at = bisect.bisect(starts, int(address, 16)) - 1
        file = sections[at][2] if at >= 0 else "the C runtime"
        if CHOSEN_AT_RUN_TIME.search(file) and not is_fused:
            chosen += 1
        else:
            wrong.setdefault(file, []).append(f"{address}: {instruction}")
    for file, found in wrong.items():
        print(f"{file}: {len(found)} instructions of newer processors, such as {found[0]}")
    if wrong:
        sys.exit(f"{wheel.name} does not run on every processor: was it built with -march?")
    print(f"{wheel.name}: {chosen} instructions of newer processors, all chosen at run time")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
