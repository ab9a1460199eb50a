/** What the address names: a screen, and what it shows. */

/**
 * @typedef {{screen: "episodes"}
 *   | {screen: "live"}
 *   | {screen: "episode", eid: string, t: number | null}} Place
 */

/**
 * Return what a fragment of an address names. Screens have names that no eid has.
 * @param {string} hash With its #.
 * @returns {Place}
 */
export function placeOf(hash) {
  const [first, second] = hash.slice(1).split("/").map(decoded);
  if (first === "") return { screen: "episodes" };
  if (first === "live") return { screen: "live" };
  return { screen: "episode", eid: first, t: /^[0-9]{1,15}$/.test(second ?? "") ? Number(second) : null };
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
