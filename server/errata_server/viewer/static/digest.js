/** Checks in the browser that state(t) is what the server says it is. */

/**
 * Return whether bytes have a digest: "same", "other", or "unknown" where the browser computes none. It does so on
 * https and on this machine only.
 * @param {Uint8Array} bytes
 * @param {string} digest As in PROTOCOL C2: "sha256:" and 64 hexadecimal digits.
 * @returns {Promise<"same" | "other" | "unknown">}
 */
export async function checked(bytes, digest) {
  if (globalThis.crypto?.subtle === undefined) return "unknown";
  const made = new Uint8Array(await crypto.subtle.digest("SHA-256", /** @type {BufferSource} */ (bytes)));
  const text = `sha256:${[...made].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  return text === digest ? "same" : "other";
}
