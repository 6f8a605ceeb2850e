"""URLs of a database, and their secrets."""

import psycopg
import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.postgres.server import PostgresUrl


def test_it_is_shown_without_its_secrets() -> None:
    url = PostgresUrl("postgresql://me:s3cret@db.example:5433/tailrace?sslpassword=other")
    assert str(url) == "host=db.example port=5433 dbname=tailrace user=me"
    assert str(PostgresUrl("host=/run/pg dbname=x password=s3cret")) == "host=/run/pg dbname=x"


@pytest.mark.parametrize(
    "text",
    [
        "s3cret",
        "postgresql://me:s3cret%zz@db.example/tailrace",
        "postgresql://me:s3cret@[::1/tailrace",
        "postgresql://me:to@s3cret@db.example/tailrace",
        "postgresql://me:5432/s3cret@db.example/tailrace",
        "postgresql://me:12/s3cret@db.example/tailrace?sslmode=require",
        "postgresql://me:s3/cret@db.example/tailrace",
        "postgresql://me:12?s3cret/@db.example/tailrace",
        "host=db.example port=s3cret",
    ],
)
def test_what_cannot_be_read_is_not_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PostgresUrl(text)
    assert "cret" not in str(refused.value)
    assert refused.value.field == "ledger.url"
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None or refused.value.__suppress_context__


def test_an_error_of_the_server_is_cut_to_a_line_without_secrets() -> None:
    url = PostgresUrl("postgresql://me:s3cret@db.example/tailrace")
    error = psycopg.OperationalError("no host s3cret@db.example\nmore of it")
    assert url.first_line(error) == "no host ***@db.example"
    assert url.first_line(psycopg.OperationalError()) == "OperationalError"
