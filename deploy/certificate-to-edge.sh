#!/bin/sh
# certbot's deploy hook: copies a new certificate and its key to TLS_FOLDER, readable by TLS_OWNER
# alone. certbot's own copy of the key is readable by root only. An edge reads the files again within
# a second of a change; it needs no restart.
set -eu
folder=${TLS_FOLDER:-/tls}
owner=${TLS_OWNER:-10001}
for pair in fullchain.pem:tls.crt privkey.pem:tls.key; do
    target=$folder/${pair#*:}
    install -o "$owner" -m 0400 "$RENEWED_LINEAGE/${pair%:*}" "$target.new"
    mv "$target.new" "$target"
done
