"""SQL statements that run often. `$n` are libpq's placeholders."""

from __future__ import annotations

CHANNEL = "tailrace"
"""Channel of notifications about streams with new frames: `lease sid sid …`, or `lease *`."""
PRESENCE_CHANNEL = "tailrace_presence"
"""Channel of notifications about numbers of readers: `lease stream stream …`, or `lease *`."""

# ---- group commit ----

# The optimistic commit: one statement, in its own transaction, checks that the streams are as in
# memory, and changes them. If a single row differs (a stream's epoch or index, or the number of the
# owner's last commit), a division by zero fails the whole statement. The pessimistic commit below
# then finds the reason. So a commit of 64 frames takes one round trip instead of three.
_COMMIT = """
WITH moved AS (
    UPDATE head SET next_index = m.after, ended = m.ends,
        expires_ms = CASE WHEN m.ends THEN $6::bigint + head.ttl_ms ELSE head.expires_ms END
    FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::boolean[])
        AS m (sid, epoch, first, after, ends)
    WHERE head.sid = m.sid AND head.epoch = m.epoch AND head.next_index = m.first
        AND NOT head.ended
    RETURNING 1
), stored AS (
    INSERT INTO frame (sid, index, ids, frame, extra)
    SELECT * FROM unnest($7::bigint[], $8::bigint[], $9::bytea[], $10::bytea[], $11::bytea[])
), numbered AS (
    UPDATE owner SET commits = $13 WHERE lease = $12 AND commits = $13 - 1 RETURNING 1
){}
SELECT 1 / ((SELECT count(*) FROM moved) = cardinality($1::bigint[])
        AND (SELECT count(*) FROM numbered) = 1)::int,
    pg_notify($14, $15)
"""
# Streams that end also get a row in `usage`. A stream has one StreamEnd, so a row that exists is
# never replaced.
_USAGE = """
INSERT INTO usage (stream, ended_ms, tenant, key, model, priority, finish, prompt_tokens,
    cached_tokens, output_tokens, reasoning_tokens, delivered_tokens)
SELECT * FROM unnest({}) ON CONFLICT (stream) DO NOTHING
"""
_USAGE_TYPES = ("bytea", "bigint", *["bytea"] * 5, *["bigint"] * 5)


def _usage(first: int) -> str:
    """Return the INSERT for rows of `usage`; its columns are the parameters from `$first` on."""
    columns = (f"${first + at}::{of}[]" for at, of in enumerate(_USAGE_TYPES))
    return _USAGE.format(", ".join(columns)).strip()


COMMIT = _COMMIT.format("")
COMMIT_WITH_USAGE = _COMMIT.format(f", used AS (\n    {_usage(16)}\n)")
INSERT_USAGE = _usage(1)

# The pessimistic commit: lock the rows in a fixed order, read, decide, write. The lock on the
# owner's row waits for an earlier commit by this origin, which a lost connection may have left in
# progress.
LOCK_OWNER = "SELECT commits FROM owner WHERE lease = $1 FOR NO KEY UPDATE"
LOCK_OBJECTS = """
SELECT o.kind, o.name, o.oid, o.epoch FROM object o
    JOIN unnest($1::bytea[], $2::bytea[]) AS k (kind, name) ON o.kind = k.kind AND o.name = k.name
WHERE o.lease = $3
ORDER BY o.oid FOR NO KEY UPDATE OF o
"""
LOCK_HEADS = """
SELECT s.id, h.sid, h.epoch, h.next_index, h.ended
FROM unnest($1::bytea[]) AS k (id) JOIN stream s ON s.id = k.id JOIN head h ON h.sid = s.sid
ORDER BY h.sid FOR NO KEY UPDATE OF h
"""
NEW_NUMBERS = "SELECT nextval('stream_number') FROM generate_series(1, $1)"
NUMBER_COMMIT = "UPDATE owner SET commits = $2 WHERE lease = $1"
INSERT_STREAMS = """
INSERT INTO stream (sid, id, kind, durability, recipe, created_ms, idempotency_key, request_hash)
SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bigint[], $5::bytea[],
    $6::bigint[], $7::bytea[], $8::bytea[])
"""
INSERT_HEADS = """
INSERT INTO head (sid, epoch, next_index, lease, ttl_ms, expires_ms, kind, ended)
SELECT sid, 1, 0, $1, ttl_ms, expires_ms, kind, false
FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[])
    AS n (sid, ttl_ms, expires_ms, kind)
"""
INSERT_FRAMES = """
INSERT INTO frame (sid, index, ids, frame, extra)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::bytea[], $5::bytea[])
"""
MOVE_HEADS = """
UPDATE head SET next_index = m.after, ended = m.ends,
    expires_ms = CASE WHEN m.ends THEN $4::bigint + head.ttl_ms ELSE head.expires_ms END
FROM unnest($1::bigint[], $2::bigint[], $3::boolean[]) AS m (sid, after, ends)
WHERE head.sid = m.sid
"""
DROP_STREAMS = """
WITH gone AS (DELETE FROM stream WHERE sid = ANY ($1) RETURNING sid),
    headless AS (DELETE FROM head WHERE sid = ANY ($1)),
    partless AS (DELETE FROM part WHERE sid = ANY ($1)),
    answerless AS (DELETE FROM answer WHERE sid = ANY ($1))
INSERT INTO expired SELECT sid FROM gone ON CONFLICT DO NOTHING RETURNING sid
"""
CLEAR_VALUES = "DELETE FROM value WHERE oid = ANY ($1)"
DELETE_VALUES = """
DELETE FROM value v USING unnest($1::bigint[], $2::bytea[]) AS k (oid, name)
WHERE v.oid = k.oid AND v.name = k.name
"""
PUT_VALUES = """
INSERT INTO value SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bytea[])
ON CONFLICT (oid, name) DO UPDATE SET value = excluded.value
"""
# Every write of an object updates the object's row, so that FORGET_OBJECTS keeps objects in use.
TOUCH_OBJECTS = """
UPDATE object o SET used_ms = $5,
    alarm_ms = CASE WHEN a.sets THEN NULLIF(a.at_ms, -1) ELSE o.alarm_ms END,
    alarm_retries = CASE WHEN a.sets THEN a.retries ELSE o.alarm_retries END
FROM unnest($1::bigint[], $2::boolean[], $3::bigint[], $4::bigint[])
    AS a (oid, sets, at_ms, retries)
WHERE o.oid = a.oid
"""
NOTIFY = "SELECT pg_notify($1, $2)"

# ---- streams ----

CREATE = """
WITH made AS (
    INSERT INTO stream
        (sid, id, kind, durability, recipe, created_ms, idempotency_key, request_hash)
    VALUES (($1::bigint << 32) | (nextval('stream_number') & 4294967295),
        $2, $3, $4, $5, $6, $7, $8)
    ON CONFLICT DO NOTHING RETURNING sid
), answers AS (
    INSERT INTO answer SELECT $12, sid FROM made WHERE $12::bytea IS NOT NULL
)
INSERT INTO head (sid, epoch, next_index, lease, ttl_ms, expires_ms, kind, ended)
SELECT sid, 1, $11, $9, $10, $6 + $10, $3, false FROM made RETURNING sid
"""
# The lock keeps the stream from being deleted until the branch refers to it.
BRANCHED = """
SELECT s.sid, h.next_index, h.ended,
    ARRAY(SELECT source FROM part WHERE part.sid = s.sid ORDER BY "end"),
    ARRAY(SELECT "end" FROM part WHERE part.sid = s.sid ORDER BY "end")
FROM stream s JOIN head h ON h.sid = s.sid WHERE s.id = $1 FOR KEY SHARE OF s
"""
INSERT_PARTS = """
INSERT INTO part (sid, source, "end") SELECT $1, * FROM unnest($2::bigint[], $3::bigint[])
"""
MADE_BY = "SELECT h.lease FROM stream s JOIN head h ON h.sid = s.sid WHERE s.id = $1"
SAME_KEY = "SELECT id, request_hash FROM stream WHERE idempotency_key = $1"
KNOWN = """
SELECT s.id FROM answer a JOIN stream s ON s.sid = a.sid JOIN head h ON h.sid = a.sid
WHERE a.identity = $1 AND h.ended ORDER BY a.sid DESC LIMIT 1
"""
STREAM = """
SELECT s.sid, s.kind, s.durability, s.recipe, s.created_ms,
    h.epoch, h.next_index, h.ended, h.ttl_ms, h.expires_ms,
    ARRAY(SELECT source FROM part WHERE part.sid = s.sid ORDER BY "end"),
    ARRAY(SELECT "end" FROM part WHERE part.sid = s.sid ORDER BY "end")
FROM stream s JOIN head h ON h.sid = s.sid WHERE s.id = $1
"""
TAKE_OVER = """
UPDATE head SET epoch = epoch + 1, lease = $2
WHERE sid = (SELECT sid FROM stream WHERE id = $1) RETURNING sid, epoch, next_index, ended
"""
UNFINISHED = """
SELECT s.id FROM head h JOIN stream s ON s.sid = h.sid LEFT JOIN owner o ON o.lease = h.lease
WHERE NOT h.ended AND h.kind = 0 AND coalesce(o.expires, '-infinity') <= $1
ORDER BY s.created_ms, s.sid
"""
RECORDS = """
SELECT frame, ids, extra FROM frame
WHERE sid = $1 AND index >= $2 AND index < $2 + $3 ORDER BY index
"""
FRAMES = """
SELECT frame FROM frame WHERE sid = $1 AND index >= $2 AND index < $2 + $3 ORDER BY index
"""
# For each stream (sid, start), select its head, and up to $3 of its frames from index `start` on.
NEWS = """
SELECT h.sid, h.epoch, h.next_index, h.ended, f.index, f.frame
FROM unnest($1::bigint[], $2::bigint[]) AS k (sid, start)
JOIN head h ON h.sid = k.sid
LEFT JOIN LATERAL (
    SELECT index, frame FROM frame
    WHERE frame.sid = k.sid AND index >= k.start AND index < k.start + $3 ORDER BY index
) f ON true
"""

# ---- owners ----

NEW_OWNER = """
INSERT INTO owner (name, expires, link)
VALUES ($1, clock_timestamp() + make_interval(secs => $2), $3) RETURNING lease
"""
OWN_HOST = "SELECT coalesce(host(inet_client_addr()), '127.0.0.1')"
END_OWNER = "DELETE FROM owner WHERE name = $1"
RENEW = """
UPDATE owner SET expires = clock_timestamp() + make_interval(secs => $2)
WHERE lease = $1
RETURNING clock_timestamp(), current_setting('fsync'), current_setting('synchronous_standby_names')
"""
FORGET_OWNERS = "DELETE FROM owner WHERE expires < clock_timestamp() - interval '1 hour'"

# ---- objects ----

CLAIM = """
INSERT INTO object (kind, name, epoch, lease, used_ms)
VALUES ($1, $2, nextval('object_epoch'), $3, $4)
ON CONFLICT (kind, name) DO UPDATE
    SET epoch = nextval('object_epoch'), lease = excluded.lease, used_ms = excluded.used_ms
    WHERE object.lease = excluded.lease OR NOT EXISTS (
        SELECT FROM owner w WHERE w.lease = object.lease AND w.expires > clock_timestamp())
RETURNING epoch, alarm_ms, alarm_retries
"""
HOLDER = """
SELECT w.name, w.link FROM object o JOIN owner w ON w.lease = o.lease
WHERE o.kind = $1 AND o.name = $2
"""
SEIZE = """
UPDATE object SET lease = $3, epoch = nextval('object_epoch') WHERE kind = $1 AND name = $2
RETURNING epoch
"""
OBJECT_EPOCH = "SELECT epoch FROM object WHERE kind = $1 AND name = $2 AND lease = $3"
GET_VALUES = """
SELECT v.name, v.value FROM object o JOIN value v ON v.oid = o.oid
WHERE o.kind = $1 AND o.name = $2 AND v.name = ANY ($3)
"""
LIST_VALUES = """
SELECT v.name, v.value FROM value v
WHERE v.oid = (SELECT oid FROM object WHERE kind = $1 AND name = $2)
    AND v.name >= $3 AND ($4::bytea IS NULL OR v.name < $4)
ORDER BY v.name {order} LIMIT $5
"""
# Alarms of another owner are due when its lease has expired, not earlier.
DUE = """
SELECT o.kind, o.name, o.alarm_ms, o.alarm_retries
FROM object o LEFT JOIN owner w ON w.lease = o.lease
WHERE o.alarm_ms <= $1 AND (o.lease = $2 OR coalesce(w.expires, '-infinity') <= clock_timestamp())
ORDER BY o.alarm_ms, o.oid LIMIT $3
"""
OBJECT_NAMES = """
SELECT o.name FROM object o
WHERE o.kind = $1 AND o.name > $2
    AND (o.alarm_ms IS NOT NULL OR EXISTS (SELECT FROM value v WHERE v.oid = o.oid))
ORDER BY o.name LIMIT $3
"""

# ---- presence ----

PUBLISH_READERS = """
WITH given AS (SELECT * FROM unnest($2::bytea[], $3::bigint[]) AS k (stream, readers)),
gone AS (
    DELETE FROM presence p USING given g
    WHERE p.lease = $1 AND p.stream = g.stream AND g.readers = 0
), stored AS (
    INSERT INTO presence (stream, lease, readers)
    SELECT stream, $1, readers FROM given WHERE readers > 0
    ON CONFLICT (stream, lease) DO UPDATE SET readers = excluded.readers
)
SELECT pg_notify($4, $5)
"""
# The numbers of the asking origin ($2 is its lease) are returned even after its lease has expired,
# so that it notices if they were lost.
PUBLISHED_READERS = """
SELECT p.stream, coalesce(sum(p.readers) FILTER (WHERE p.lease = $2), 0)::bigint,
    coalesce(sum(p.readers) FILTER (WHERE p.lease <> $2), 0)::bigint
FROM presence p JOIN owner w ON w.lease = p.lease
WHERE p.stream = ANY ($1) AND (p.lease = $2 OR w.expires > clock_timestamp())
GROUP BY p.stream
"""
FORGET_READERS = """
DELETE FROM presence p WHERE NOT EXISTS (SELECT FROM owner w WHERE w.lease = p.lease)
"""

# ---- retention ----

TOUCH = """
UPDATE head SET expires_ms = greatest(head.expires_ms, t.expires_ms)
FROM unnest($1::bigint[], $2::bigint[]) AS t (sid, expires_ms)
WHERE head.sid = t.sid RETURNING head.sid
"""
# A stream has expired if it has both by this origin's clock ($1) and by the server's clock plus a
# minute. So an origin whose clock is ahead does not remove streams too early.
EXPIRED = """
SELECT sid FROM head WHERE ended AND kind = 0
    AND expires_ms <= least($1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 60000)
ORDER BY expires_ms LIMIT $2 FOR UPDATE SKIP LOCKED
"""
PARTITIONS = """
SELECT substring(c.relname FROM 7)::bigint FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'frame'::regclass ORDER BY 1
"""
# The frames of an expired stream stay while a branch refers to them.
LIVES = """
SELECT EXISTS (SELECT FROM head WHERE sid >= $1 AND sid < $2)
    OR EXISTS (SELECT FROM part WHERE source >= $1 AND source < $2)
"""
LEFTOVERS = """
SELECT sid FROM expired
WHERE sid < $1 AND NOT EXISTS (SELECT FROM part WHERE source = expired.sid)
ORDER BY sid LIMIT $2
"""
PURGE = """
DELETE FROM frame
WHERE sid = $1 AND index < (SELECT min(index) FROM frame WHERE sid = $1) + $2
    AND NOT EXISTS (SELECT FROM part WHERE source = $1)
"""
FORGET_EXPIRED = """
DELETE FROM expired
WHERE sid >= $1 AND sid < $2 AND NOT EXISTS (SELECT FROM part WHERE source = expired.sid)
"""
FORGET_OBJECTS = """
DELETE FROM object WHERE oid IN (
    SELECT oid FROM object o
    WHERE o.alarm_ms IS NULL AND o.used_ms < $1
        AND NOT EXISTS (SELECT FROM value v WHERE v.oid = o.oid)
    LIMIT $2 FOR UPDATE SKIP LOCKED
)
"""
FORGET_USAGE = """
DELETE FROM usage WHERE stream IN (
    SELECT stream FROM usage WHERE ended_ms < $1 ORDER BY ended_ms LIMIT $2 FOR UPDATE SKIP LOCKED
)
"""
SET_DELIVERED = """
UPDATE usage u SET delivered_tokens = least(u.output_tokens, d.tokens)
FROM unnest($1::bytea[], $2::bigint[]) AS d (stream, tokens)
WHERE u.stream = d.stream AND u.delivered_tokens < least(u.output_tokens, d.tokens) RETURNING 1
"""
TABLE_BYTES = """
SELECT sum(pg_total_relation_size(oid))::bigint AS table_bytes FROM pg_class
WHERE relnamespace = 'tailrace'::regnamespace AND relkind = 'r'
"""
