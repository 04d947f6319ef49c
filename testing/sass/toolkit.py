"""The CUDA compiler and disassembler: where they are, and how the kernels are compiled."""
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path

# As build.rs compiles, but warnings and spills are errors.
FLAGS = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas", "--warn-on-spills,--warning-as-error"]

CUBINS = Path(os.environ.get("CARGO_TARGET_DIR") or Path(__file__).resolve().parent.parent.parent / "target", "cubins")


class ToolError(Exception):
    """A tool is missing or failed; the message says what to do, or what it printed."""


class Toolkit:
    """nvcc, cuobjdump and nvdisasm of one installation."""

    def __init__(self):
        self.nvcc = os.environ.get("NVCC") or self._find("nvcc")
        self.cuobjdump = self._find("cuobjdump", beside=self.nvcc)
        nvdisasm = self._find("nvdisasm", beside=self.nvcc)
        # cuobjdump looks for nvdisasm on PATH.
        self.environment = dict(os.environ, PATH=f"{Path(nvdisasm).parent}{os.pathsep}{os.environ['PATH']}")

    @staticmethod
    def _find(tool, beside=None):
        homes = [Path(beside).parent] if beside else []
        homes += [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
        homes += map(Path, sorted(glob.glob(f"{sysconfig.get_paths()['purelib']}/nvidia/cu*/bin")))
        found = shutil.which(tool, path=os.pathsep.join(map(str, homes))) or shutil.which(tool)
        if not found:
            raise ToolError(f"{tool} is not there: run scripts/sass-gate.sh, which fetches it, or set NVCC or CUDA_HOME")
        return found

    def run(self, *command):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=self.environment)
        if done.returncode:
            raise ToolError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
        return done.stdout

    @functools.cache
    def version(self):
        return re.search(r"V(\d+\.\d+\.\d+)", self.run(self.nvcc, "--version")).group(1)

    def compile(self, source, arch, cubin):
        """The same sources are compiled only once: cubins stay in `CUBINS`, until somebody removes them."""
        sources = [source, *sorted(source.parent.rglob("*.cuh")), *sorted(source.parent.rglob("*.h"))]
        text = [self.version(), arch, *FLAGS]
        text += [f"{path.relative_to(source.parent)}\n{path.read_text()}" for path in sources]
        kept = CUBINS / hashlib.sha256(json.dumps(text).encode()).hexdigest()
        if not kept.exists():
            self.run(self.nvcc, *FLAGS, f"-arch=sm_{arch}", "-cubin", source, "-o", cubin)
            CUBINS.mkdir(parents=True, exist_ok=True)
            # Not seen by others before it is whole.
            unfinished = kept.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            shutil.copyfile(cubin, unfinished)
            unfinished.rename(kept)
        return shutil.copyfile(kept, cubin)

    def disassembly(self, cubin):
        return self.run(self.cuobjdump, "--dump-sass", cubin)

    def resource_usage(self, cubin):
        return self.run(self.cuobjdump, "--dump-resource-usage", cubin)
