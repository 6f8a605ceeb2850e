/** What an edge may know of a resume token: whether it is one that was seen, and until when it is good.
 *
 * Its mac is the origin's to check. An edge only reads the expiry of tokens that the origin has
 * made or let in.
 */

/** The payload: 16 bytes of stream, one of rights, then the expiry (u64, Unix ms). */
const EXPIRY_AT = 17;

export async function digestOf(token: string): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(token));
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** When the token expires, in Unix ms; 0, which is past, where it does not say so. */
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
