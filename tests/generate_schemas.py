"""Write the `.bare` files from the classes of the frames: `python -m tests.generate_schemas`.

`make schemas` also writes what is generated from the text: the tables and types for JavaScript, and
the vectors. tests/test_protocol.py fails if a file is not current.
"""

from __future__ import annotations

from pathlib import Path

from tailrace.ledger.wire import schema
from tailrace.origin.workers import worker_frame
from tests.schema_text import CLIENT_SCHEMA, WORKER_SCHEMA

_CLIENT_HEAD = """\
# The Tailrace wire schema (BARE, draft-devault-bare). PROTOCOL.md explains it.
# Its identity depends on tags, types and their order, and not on names.
# Written by `python -m tests.generate_schemas` from the classes of ledger/wire/schema.py.
"""
_WORKER_HEAD = """\
# The frames between a supervisor and its workers (BARE, draft-devault-bare). They travel on a Unix
# socket between two processes of one machine and one version, never to a client. The identity is
# computed as that of ledger/wire/tailrace.bare.
# Written by `python -m tests.generate_schemas` from the classes of origin/workers/worker_frame.py.
"""


def written() -> dict[Path, str]:
    """Return the text of every schema file."""
    return {
        CLIENT_SCHEMA: f"{_CLIENT_HEAD}\n{schema.SCHEMA_TEXT}",
        WORKER_SCHEMA: f"{_WORKER_HEAD}\n{worker_frame.SCHEMA_TEXT}",
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, "utf-8")
