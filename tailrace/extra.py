"""What of the product needs an extra of the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ledger.errors import ConfigError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports that need the extra `name`: a missing package says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("edge", "kernels", "ledger", "origin", "tailrace"):
            raise  # a fault of ours, not of the installation
        raise ConfigError(
            f"the package {package!r} is not installed",
            hint=f"pip install 'tailrace[{name}]'",
        ) from error
