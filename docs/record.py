"""Records a command in a terminal of its own as an SVG: how docs/cut-and-resumed.svg was made.

make up                                                    # in another terminal
.venv/bin/python docs/record.py docs/cut-and-resumed.svg \
        .venv/bin/tailrace chat "Tell me a story about a fox." --seed 7 --cut-after 12
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 88, 24


def output_of(command: list[str]) -> str:
    """Return what `command` writes to its terminal."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written = b""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # EIO: the child has closed its terminal
            data = b""
        if not data:
            os.waitpid(child, 0)
            return written.decode().replace("\r\n", "\n")
        written += data


def main() -> None:
    picture, *command = sys.argv[1:]
    shown = shlex.join([Path(command[0]).name, *command[1:]])
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text(f"$ {shown}", style="bold"))
        console.print(Text.from_ansi(output_of(command)))
        drawn = console.export_svg(title="A stream survives a cut")
    # The picture must not fetch fonts from anywhere: a reader's monospace one will do.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    Path(picture).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
