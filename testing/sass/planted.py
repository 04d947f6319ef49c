"""Does the gate notice bugs? Plants each of planted/*.patch in a copy of cuda/ and compiles what has it.

    python3 testing/sass/planted.py [NAME ..]    all, or those of planted/NAME.patch

A patch begins with
    Bug: what is wrong.
    Kernels: the sources of cuda/ that get the bug, without `.cu`; few and short, for they have to be compiled
    Complaint: part of what the gate has to say, and does not say without the bug
The exit code is 0 if every bug was noticed.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measure import measure
from sass_gate import CHECKED_ARCH, HERE, LAUNCHES, SOURCES, read_kernels
from toolkit import Toolkit, ToolError

PATCHES = HERE / "planted"


def complaints_of(toolkit, sources, names, folder):
    """What the gate has to say of the kernels of sources/NAME.cu."""
    cubins = [toolkit.compile(sources / f"{name}.cu", CHECKED_ARCH, folder / f"{name}.cubin") for name in names]
    launches = json.loads(LAUNCHES.read_text())
    return [complaint for kernel in read_kernels(toolkit, cubins).values() for complaint in measure(kernel, launches)[1]]


def head_of(patch):
    return dict(re.findall(r"^(\w+): (.*)$", patch.read_text().split("\n---")[0], re.MULTILINE))


def verdict(toolkit, patch, folder, unharmed):
    """`unharmed` is what the gate has to say of each kernel's source without a bug, once that is known."""
    head = head_of(patch)
    names, expected = head["Kernels"].split(), head["Complaint"]
    harmed = Path(shutil.copytree(SOURCES, folder / "cuda"))
    applied = subprocess.run(["patch", "--quiet", "-p1", f"--input={patch}"], cwd=folder, capture_output=True, text=True)
    if applied.returncode:
        return "does not apply any more"
    found = complaints_of(toolkit, harmed, names, folder)
    if any(expected in complaint for name in names for complaint in unharmed[name].result()):
        return "noticed without it, too"
    return "noticed" if any(expected in complaint for complaint in found) else f"MISSED, only {found}"


def main():
    patches = [PATCHES / f"{name}.patch" for name in sys.argv[1:]] or sorted(PATCHES.glob("*.patch"))
    toolkit, noticed, heads = Toolkit(), 0, [head_of(patch) for patch in patches]
    sources = sorted({name for head in heads for name in head["Kernels"].split()})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        def fresh(name):
            return Path(tempfile.mkdtemp(dir=folder, prefix=name))
        # First, as the verdicts wait for them.
        unharmed = {name: pool.submit(complaints_of, toolkit, SOURCES, [name], fresh(name)) for name in sources}
        verdicts = [pool.submit(verdict, toolkit, patch, fresh(patch.stem), unharmed) for patch in patches]
        for patch, head, result in zip(patches, heads, (one.result() for one in verdicts)):
            noticed += result == "noticed"
            print(f"{patch.stem:30s} {result:10s} {head['Bug']}", flush=True)
    print(f"{noticed} of {len(patches)} planted bugs noticed")
    sys.exit(noticed != len(patches) or not patches)


if __name__ == "__main__":
    try:
        main()
    except ToolError as error:
        sys.exit(f"planted bugs: {error}")
