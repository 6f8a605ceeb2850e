"""The header fields of the Durable Streams protocol, in lower case as objects get them."""

from __future__ import annotations

CONTENT_TYPE = "content-type"
CACHE_CONTROL = "cache-control"
ETAG = "etag"
IF_NONE_MATCH = "if-none-match"
LOCATION = "location"
ALLOW = "allow"

NEXT_OFFSET = "stream-next-offset"
UP_TO_DATE = "stream-up-to-date"
CLOSED = "stream-closed"
CURSOR = "stream-cursor"
SEQ = "stream-seq"
TTL = "stream-ttl"
EXPIRES_AT = "stream-expires-at"
DATA_ENCODING = "stream-sse-data-encoding"

FORKED_FROM = "stream-forked-from"
FORK_OFFSET = "stream-fork-offset"
FORK_SUB_OFFSET = "stream-fork-sub-offset"

PRODUCER_ID = "producer-id"
PRODUCER_EPOCH = "producer-epoch"
PRODUCER_SEQ = "producer-seq"
PRODUCER_EXPECTED_SEQ = "producer-expected-seq"
PRODUCER_RECEIVED_SEQ = "producer-received-seq"

TRUE = "true"
"""The only value that means yes, in any case."""
