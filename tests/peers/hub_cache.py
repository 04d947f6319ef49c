"""Whether Python's huggingface_hub finds what candle-quant has fetched, and candle-quant what it has.

    pip install huggingface_hub==2.4.0
    python hub_cache.py CANDLE_QUANT FOLDER

CANDLE_QUANT is the program, FOLDER a checkpoint: a server that speaks as the hub does has its files.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "org/model"
COMMIT = "0123456789abcdef" * 2 + "01234567"

program, folder = sys.argv[1], Path(sys.argv[2])
FILES = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def is_large(name):
    return name.endswith((".safetensors", ".gguf", "tokenizer.json"))


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def blob(data):
    """What git calls a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def tree(name, data):
    entry = {"type": "file", "path": name, "size": len(data), "oid": blob(data)}
    return entry | ({"lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 130}} if is_large(name) else {})


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, data, **headers):
        self.send_response(200)
        for name, value in {"content-length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def do_GET(self):
        path = self.path.split("?")[0]
        name = path.rsplit("/", 1)[-1]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            listing = [tree(name, data) for name, data in FILES.items()]
            self.answer(json.dumps(listing).encode(), content_type="application/json")
        elif path.startswith(f"/api/models/{NAME}"):
            info = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            self.answer(json.dumps(info).encode(), content_type="application/json")
        elif name in FILES:
            data = FILES[name]
            etag = sha256(data) if is_large(name) else blob(data)
            self.answer(data, x_repo_commit=COMMIT, etag=f'"{etag}"')
        else:
            self.send_error(404)

    do_HEAD = do_GET


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
os.environ["HF_HUB_DISABLE_XET"] = "1"

from huggingface_hub import snapshot_download  # noqa: E402


def run(cache, *arguments, **variables):
    environment = os.environ | {"HF_HUB_CACHE": str(cache)} | variables
    return subprocess.run([program, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def layout(root):
    """What is in the folder of a repository: files with their bytes, links with their targets. Python also notes lists
    of files, in `trees`."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_symlink() or path.is_file()]
    content = {str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}
    return {path: content for path, content in content.items() if not path.startswith("trees/")}


with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
    path = run(ours, "pull", NAME).strip()
    found = snapshot_download(NAME, cache_dir=ours, local_files_only=True)
    assert os.path.samefile(path, found), (path, found)
    fetched = sorted(file.name for file in Path(path).iterdir())
    snapshot_download(NAME, cache_dir=theirs, allow_patterns=fetched)
    own, other = (layout(Path(cache) / "models--org--model") for cache in (ours, theirs))
    assert own == other, (sorted(own), sorted(other))
    for cache in ours, theirs:
        run(cache, "inspect", NAME, HF_HUB_OFFLINE="1")
        assert run(cache, "list", HF_HUB_OFFLINE="1").startswith(NAME)
    print(f"the same {len(own)} files and links, found by both: {', '.join(fetched)}")
