"""A conversation with the bundled model, typed into `candle-quant chat` in tmux: python3 benches/record_chat.py PROGRAM

What the terminal shows at the end goes to benches/chat.ansi, of which benches/pictures.py makes a picture. The model
knows nothing but short stories and has no chat template. It gets one: each message begins a story.
"""
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benches/chat.ansi"
COLUMNS, ROWS = 100, 30
TEMPLATE = "{% for message in messages %}{% if message.role == 'user' %}<|endoftext|>{% endif %}{{ message.content }}{% endfor %}"
COMMAND = "candle-quant chat stories --cpu --temperature 0.5 --seed 5"
TYPED = ["Once upon a time, a small mouse named Penny", "/reset", "Once upon a time, there was a brave little dragon"]
PROMPT = ">>>"
PATIENCE = 60.0  # seconds


class Terminal:
    """A shell in a tmux of its own."""

    def __init__(self, folder, path):
        self.tmux = ["tmux", "-L", f"record-chat-{os.getpid()}"]
        shell = f"env PATH={shlex.quote(path)} PS1='$ ' TERM=tmux-256color bash --norc --noprofile"
        self.run("-f", "/dev/null", "new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "-c", folder, shell)

    def run(self, *arguments):
        return subprocess.run([*self.tmux, *arguments], check=True, capture_output=True, text=True).stdout

    def shown(self, *options):
        return self.run("capture-pane", "-p", *options)

    def type(self, line, prompts):
        """Types a line, and waits until so many prompts are there, and the last waits for input."""
        self.run("send-keys", "-l", line)
        self.run("send-keys", "Enter")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            lines = self.shown().rstrip("\n").split("\n")
            if sum(line.startswith(PROMPT) for line in lines) == prompts and lines[-1] == PROMPT:
                return
            time.sleep(0.05)
        sys.exit(f"after {line!r} no answer came in {PATIENCE:g} s:\n{self.shown()}")

    def close(self):
        subprocess.run([*self.tmux, "kill-server"], capture_output=True)


def record(program):
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "stories"
        model.mkdir()
        for file in (ROOT / "assets/tiny").iterdir():
            (model / file.name).symlink_to(file)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        programs = Path(folder) / "programs"
        programs.mkdir()
        (programs / "candle-quant").symlink_to(program)
        terminal = Terminal(folder, f"{programs}:{os.environ['PATH']}")
        try:
            for prompts, line in enumerate([COMMAND, *TYPED], start=1):
                terminal.type(line, prompts)
            return terminal.shown("-e").rstrip("\n") + "\n"
        finally:
            terminal.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    RECORD.write_text(record(Path(sys.argv[1]).resolve(strict=True)))
    print(f"recorded in {RECORD.relative_to(ROOT)}; now: python3 benches/pictures.py")
