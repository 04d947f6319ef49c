"""unpack.py FOLDER PROGRAM..: programs of carry/ into a folder; fails if one, or a library of one, is missing."""
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

CARRY = Path("carry")


def unpack(folder, programs):
    packed = CARRY / "programs.tar.xz"
    if packed.exists():
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
    missing = [program for program in programs if not (folder / program).exists()]
    if missing:
        sys.exit(f"missing in {packed}: {', '.join(missing)}: scripts/gpu.sh build makes it")
    libraries = subprocess.run(["ldd", *(folder / program for program in programs)], capture_output=True, text=True).stdout
    absent = sorted({line.split()[0] for line in libraries.splitlines() if "not found" in line})
    if absent:
        sys.exit(f"libraries are missing: {', '.join(absent)}")
    # Tests look for their files where they were built.
    built_in = Path((CARRY / "built-in").read_text().strip())
    if not built_in.exists():
        built_in.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(Path.cwd(), built_in)
    for line in (CARRY / "binaries").read_text().splitlines():
        name, path = line.split(maxsplit=1)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, path)


unpack(Path(sys.argv[1]), sys.argv[2:])
