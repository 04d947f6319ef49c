"""Whether Python's huggingface_hub finds what candle-quant has fetched, and candle-quant what it has.

    pip install huggingface_hub==2.4.0
    python hub_cache.py CANDLE_QUANT ENDPOINT org/model

CANDLE_QUANT is the program, ENDPOINT a hub or a mirror, as `https://huggingface.co`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

program, endpoint, name = sys.argv[1:]
os.environ["HF_ENDPOINT"] = endpoint
os.environ["HF_HUB_DISABLE_XET"] = "1"

from huggingface_hub import snapshot_download  # noqa: E402


def run(cache, *arguments, **variables):
    environment = os.environ | {"HF_HUB_CACHE": str(cache)} | variables
    return subprocess.run([program, *arguments], env=environment, check=True, capture_output=True, text=True).stdout


def layout(root):
    """Everything in the folder of a repository: files with their bytes, links with their targets."""
    paths = sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file())
    kinds = {path.relative_to(root).parts[0] for path in paths}
    assert kinds <= {"blobs", "refs", "snapshots", "trees"}, kinds
    content = lambda path: os.readlink(path) if path.is_symlink() else path.read_bytes()
    return {str(path.relative_to(root)): content(path) for path in paths if "trees" not in path.parts}


with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
    path = run(ours, "pull", name).strip()
    found = snapshot_download(name, cache_dir=ours, local_files_only=True)
    assert os.path.samefile(path, found), (path, found)
    files = sorted(file.name for file in Path(path).iterdir())
    snapshot_download(name, cache_dir=theirs, allow_patterns=files)
    folder = "models--" + name.replace("/", "--")
    assert layout(Path(ours) / folder) == layout(Path(theirs) / folder)
    for cache in ours, theirs:
        run(cache, "inspect", name, HF_HUB_OFFLINE="1")
        assert name in run(cache, "list")
    print(f"{name}: the same {len(files)} files, found by both")
