/** What two turns have in common. */

/** @typedef {"" | "outcome" | "action" | "end"} Difference ``end``: one of the two is missing. */

/**
 * Return what differs first in two turns: what was done, or else what came of it.
 * @param {import("./api.js").Turn | undefined} one
 * @param {import("./api.js").Turn | undefined} other
 * @returns {Difference}
 */
export function difference(one, other) {
  if (one === undefined || other === undefined) return "end";
  if (!sameAction(one, other)) return "action";
  return sameOutcome(one, other) ? "" : "outcome";
}

/**
 * Return whether the same came of two turns. The place of an error has a t, so the digests of two marked turns say
 * nothing where they stand at another t, as in a fork: of these the marker, reward and end are compared.
 * @param {import("./api.js").Turn} one
 * @param {import("./api.js").Turn} other
 */
function sameOutcome(one, other) {
  if (one.error_kind === null || other.error_kind === null || one.t === other.t) {
    return (one.semantic_digest ?? one.digest) === (other.semantic_digest ?? other.digest);
  }
  const facts = (/** @type {import("./api.js").Turn} */ { error_kind, error_site, hint_template_key, severity, reward, done, exit_code, error, tool }) =>
    canonical([error_kind, { ...error_site, t: null }, hint_template_key, severity, reward, done, exit_code, error, tool]);
  return facts(one) === facts(other);
}

/**
 * Return whether two turns did the same. Arguments of a reset are none of an agent's acts; of an action that is cut its
 * beginnings and its size are compared.
 * @param {import("./api.js").Turn} one
 * @param {import("./api.js").Turn} other
 */
export function sameAction(one, other) {
  if (one.kind !== other.kind) return false;
  if (one.kind === "reset") return true;
  if (one.action_cut !== other.action_cut || (one.action_cut && one.action_bytes !== other.action_bytes)) return false;
  return canonical(one.action) === canonical(other.action);
}

/** @param {any} value */
function canonical(value) {
  return JSON.stringify(value, (_, held) => (held !== null && typeof held === "object" && !Array.isArray(held) ? Object.fromEntries(Object.entries(held).sort(([a], [b]) => (a < b ? -1 : 1))) : held));
}
