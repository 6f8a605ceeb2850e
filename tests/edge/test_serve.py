"""Options that an edge gives to its server."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tailrace.edge.config import EdgeConfig
from tailrace.edge.server.listen import Sockets, alt_svc
from tailrace.up import development_certificate


@pytest.mark.parametrize("asked", [False, True])
def test_http3_is_served_and_told_only_where_it_was_asked_for(tmp_path: Path, asked: bool) -> None:
    files = development_certificate(tmp_path, datetime.now(UTC))
    config = EdgeConfig(
        http=(),
        https=("127.0.0.1:0",),
        http3=asked,
        certificate=files.certificate,
        key=files.key,
    )
    sockets = Sockets.bound(config)
    try:
        assert len(sockets.secure) == 1
        assert bool(sockets.quic) is asked
        assert bool(alt_svc(sockets.quic)) is asked
    finally:
        sockets.close()
