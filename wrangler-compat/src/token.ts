/** The digest and the expiry of a resume token.
 *
 * Only the origin can check the token's mac. This edge reads the expiry of tokens that the origin
 * has issued or accepted.
 */

/** Offset of the expiry (u64, Unix ms) in the payload, after the stream (16 bytes) and the rights
 * (1).
 */
const EXPIRY_AT = 17;

export async function digestOf(token: string): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(token));
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Return the time in Unix ms at which the token expires, or 0 if it does not have one. */
export function expiryOf(token: string): number {
  const payload = token.split(".")[2] ?? "";
  try {
    const raw = atob(payload.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(raw, (char) => char.charCodeAt(0));
    return Number(new DataView(bytes.buffer).getBigUint64(EXPIRY_AT, true));
  } catch {
    return 0;
  }
}
