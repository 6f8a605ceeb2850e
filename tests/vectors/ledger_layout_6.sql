-- A ledger file of layout 6, written by the last release of it: see test_upgrade.py.
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA application_id = 1414679601;
PRAGMA user_version = 6;
BEGIN TRANSACTION;
CREATE TABLE log (seq INTEGER PRIMARY KEY, batch BLOB NOT NULL);
INSERT INTO "log" VALUES(1,X'DC6D67740F21260F0100000001040100010101070B0000010000000000042074686500');
INSERT INTO "log" VALUES(2,X'60D6F4BA99112178010000000104010101040407000000080000C0090000800A0000C01000000100000000000920616E64207468656E01');
INSERT INTO "log" VALUES(3,X'E4A13F89234028E10100000001040102010101090B0000010000000000042073617402');
INSERT INTO "log" VALUES(4,X'70FB525C384BE40E0100000001050100010001180000011800000000076C6F6164696E67096973206C6F6164656400');
INSERT INTO "log" VALUES(5,X'600A0DA3AE7BE37901000000010501010100011E000001180000000006656E67696E651074686520666972737420656E67696E6501');
INSERT INTO "log" VALUES(6,X'129495BA142AEAE00100000001050102010101090B0000010000000000042073617402');
CREATE TABLE object (
    oid           INTEGER PRIMARY KEY,        -- short local id, used by object_value
    kind          TEXT    NOT NULL,
    name          TEXT    NOT NULL,
    epoch         INTEGER NOT NULL,
    alarm_ms      INTEGER,                    -- Unix time
    alarm_retries INTEGER NOT NULL,
    crc           INTEGER NOT NULL,
    UNIQUE (kind, name)
);
INSERT INTO "object" VALUES(1,'stream','one',1,NULL,0,1656564526);
CREATE TABLE object_value (
    oid   INTEGER NOT NULL,
    name  TEXT    NOT NULL,
    value BLOB    NOT NULL,
    crc   INTEGER NOT NULL,
    PRIMARY KEY (oid, name)
) WITHOUT ROWID;
INSERT INTO "object_value" VALUES(1,'value',X'31',3432260869);
CREATE TABLE removed (sid INTEGER PRIMARY KEY);
CREATE TABLE segment (
    sid     INTEGER NOT NULL,
    first   INTEGER NOT NULL,                 -- index of its first record
    length  INTEGER NOT NULL,                 -- records in it
    coding  INTEGER NOT NULL,                 -- 0: plain, 1: cold
    records BLOB    NOT NULL,
    PRIMARY KEY (sid, first)                  -- an index beside it: what is large is only added
);
INSERT INTO "segment" VALUES(1,0,41,1,X'062E26E928B52FFD209FAC000068070000000100010203040506000200295C2E5004400000010808080604081F2802000101010101010109040700000008000000090000000A0000000B0000000C000000FFFFFFFF030000000E0000003806000006000000350000003A00000002000000FEFFFFFF200100207468652063617420736174206F6E2061206D61740B0000010100000000280028020000010000');
INSERT INTO "segment" VALUES(2,0,41,1,X'82F6C12328B52FFD20C2BC000078080000000100010003040506010700020029960BA00848000001081208060408081FEC010052840B14D0670E05200A700A80370674F516D95BA6EC2D53DB9603476E1C8D8E170FB68DF8BAAA920765E1E9E92C738C0904004315F073A02B13085C166801002074686520616E64207468656E20736174206F6E2061206D6174206361740B0000010100000000280028020000010000');
INSERT INTO "segment" VALUES(3,0,4,0,X'2D657E3E04000000410000000B00000100000000000420746865001000000100000000000920616E64207468656E010B00000100000000000420736174020B00000101000000000300030200000101040109040700000007000000080000C0090000800A0000C009000000FFFFFFFF030000000E0000003806000006000000350000003A00000002000000FEFFFFFF');
CREATE TABLE stream (
    sid             INTEGER PRIMARY KEY,      -- short local id, used by log and segment
    id              BLOB    NOT NULL UNIQUE,  -- 16 random bytes, the public id
    kind            INTEGER NOT NULL,         -- 0: an engine's, 1: an object's
    epoch           INTEGER NOT NULL,         -- fencing number of the current producer
    ended           INTEGER NOT NULL,         -- 1 once the StreamEnd is in a segment
    durability      INTEGER NOT NULL,
    recipe          TEXT    NOT NULL,         -- what a continuation needs, JSON
    created_ms      INTEGER NOT NULL,         -- Unix time
    ttl_ms          INTEGER NOT NULL,
    expires_ms      INTEGER NOT NULL,         -- Unix time; slides with reads and writes
    idempotency_key TEXT    UNIQUE,
    request_hash    BLOB    NOT NULL,
    cold            INTEGER NOT NULL DEFAULT 0, -- 1 once every segment of an ended stream is
    crc             INTEGER NOT NULL          -- of what is above but `cold` (checksum.py)
);
INSERT INTO "stream" VALUES(1,X'01010101010101010101010101010101',0,1,1,1,'{"model":"demo","fingerprint":"fingerprint","prompt_ids":"BQAAAAYAAAA=","prompt_sha256":"f1833c11f88585608c320b53224d2642b97af5fdb9cae59c13fcab53f37c4b06","prompt":null,"messages":[],"max_tokens":99,"sampling":{"temperature":0.0,"top_k":0,"top_p":1.0,"min_p":null,"repetition_penalty":null,"presence_penalty":null,"frequency_penalty":null,"seed":1},"given":null,"stop":[],"ignore_eos":true,"completes":false,"logprobs":null,"format":null,"tools":null,"priority":"standard","unread":"run","unread_after_s":0,"notices":[],"siblings":[],"tenant":"","note":null,"trace":null}',1750000000000,3153600000000,4903600000000,'key 1',X'68',1,3586766490);
INSERT INTO "stream" VALUES(2,X'02020202020202020202020202020202',0,1,1,1,'{"model":"demo","fingerprint":"fingerprint","prompt_ids":"BQAAAAYAAAA=","prompt_sha256":"f1833c11f88585608c320b53224d2642b97af5fdb9cae59c13fcab53f37c4b06","prompt":null,"messages":[],"max_tokens":99,"sampling":{"temperature":0.0,"top_k":0,"top_p":1.0,"min_p":null,"repetition_penalty":null,"presence_penalty":null,"frequency_penalty":null,"seed":1},"given":null,"stop":[],"ignore_eos":true,"completes":false,"logprobs":null,"format":null,"tools":null,"priority":"standard","unread":"run","unread_after_s":0,"notices":[],"siblings":[],"tenant":"","note":null,"trace":null}',1750000000000,3153600000000,4903600000000,'key 2',X'68',1,2543599340);
INSERT INTO "stream" VALUES(3,X'03030303030303030303030303030303',0,1,1,1,'{"model":"demo","fingerprint":"fingerprint","prompt_ids":"BQAAAAYAAAA=","prompt_sha256":"f1833c11f88585608c320b53224d2642b97af5fdb9cae59c13fcab53f37c4b06","prompt":null,"messages":[],"max_tokens":99,"sampling":{"temperature":0.0,"top_k":0,"top_p":1.0,"min_p":null,"repetition_penalty":null,"presence_penalty":null,"frequency_penalty":null,"seed":1},"given":null,"stop":[],"ignore_eos":true,"completes":false,"logprobs":null,"format":null,"tools":null,"priority":"standard","unread":"run","unread_after_s":0,"notices":[],"siblings":[],"tenant":"","note":null,"trace":null}',1750000100000,3153600000000,4903600100000,'key 3',X'68',0,637103374);
INSERT INTO "stream" VALUES(4,X'04040404040404040404040404040404',0,1,0,1,'{"model":"demo","fingerprint":"fingerprint","prompt_ids":"BQAAAAYAAAA=","prompt_sha256":"f1833c11f88585608c320b53224d2642b97af5fdb9cae59c13fcab53f37c4b06","prompt":null,"messages":[],"max_tokens":99,"sampling":{"temperature":0.0,"top_k":0,"top_p":1.0,"min_p":null,"repetition_penalty":null,"presence_penalty":null,"frequency_penalty":null,"seed":1},"given":null,"stop":[],"ignore_eos":true,"completes":false,"logprobs":null,"format":null,"tools":null,"priority":"standard","unread":"run","unread_after_s":0,"notices":[],"siblings":[],"tenant":"","note":null,"trace":null}',1750000100000,3153600000000,4903600100000,'key 4',X'68',0,2920756044);
INSERT INTO "stream" VALUES(5,X'05050505050505050505050505050505',0,1,0,1,'{"model":"demo","fingerprint":"","prompt_ids":"BQAAAAYAAAA=","prompt_sha256":"f1833c11f88585608c320b53224d2642b97af5fdb9cae59c13fcab53f37c4b06","prompt":null,"messages":[],"max_tokens":99,"sampling":{"temperature":0.0,"top_k":0,"top_p":1.0,"min_p":null,"repetition_penalty":null,"presence_penalty":null,"frequency_penalty":null,"seed":1},"given":null,"stop":[],"ignore_eos":true,"completes":false,"logprobs":null,"format":null,"tools":null,"priority":"standard","unread":"run","unread_after_s":0,"notices":[["loading","is loaded"]],"siblings":[],"tenant":"","note":null,"trace":null}',1750000100000,3153600000000,4903600100000,'key 5',X'68',0,76369018);
INSERT INTO "stream" VALUES(6,X'06060606060606060606060606060606',0,1,0,1,'{"model":"demo","fingerprint":"fingerprint","prompt_ids":"BQAAAAYAAAA=","prompt_sha256":"f1833c11f88585608c320b53224d2642b97af5fdb9cae59c13fcab53f37c4b06","prompt":null,"messages":[],"max_tokens":99,"sampling":{"temperature":0.0,"top_k":0,"top_p":1.0,"min_p":null,"repetition_penalty":null,"presence_penalty":null,"frequency_penalty":null,"seed":1},"given":null,"stop":[],"ignore_eos":true,"completes":false,"logprobs":null,"format":null,"tools":null,"priority":"standard","unread":"run","unread_after_s":0,"notices":[],"siblings":[],"tenant":"","note":null,"trace":null}',1750000100000,3153600000000,4903600100000,'key 6',X'68',0,1688288983);
CREATE INDEX stream_by_expiry ON stream (kind, expires_ms) WHERE ended = 1;
CREATE INDEX stream_unfinished ON stream (kind, created_ms) WHERE ended = 0;
CREATE INDEX stream_warm ON stream (expires_ms - ttl_ms) WHERE ended = 1 AND cold = 0;
CREATE INDEX object_by_alarm ON object (alarm_ms) WHERE alarm_ms IS NOT NULL;
COMMIT;
