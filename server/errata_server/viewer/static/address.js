/** What the address names: a screen, and what it shows. */

/**
 * @typedef {{screen: "episodes"}
 *   | {screen: "live"}
 *   | {screen: "forks", eid: string}
 *   | {screen: "compare", eids: [string, string]}
 *   | {screen: "episode", eid: string, t: number | null}} Place
 */

/**
 * Return what a fragment of an address names. Screens have names that no eid has.
 * @param {string} hash With its #.
 * @returns {Place}
 */
export function placeOf(hash) {
  const [first, second, third] = hash.slice(1).split("/").map(decoded);
  if (first === "") return { screen: "episodes" };
  if (first === "live") return { screen: "live" };
  if (first === "forks" && second) return { screen: "forks", eid: second };
  if (first === "compare" && second && third) return { screen: "compare", eids: [second, third] };
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
