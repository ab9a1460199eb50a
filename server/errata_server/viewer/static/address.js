/** What the address names: a screen, and what it shows. */

/** @typedef {{kind: string}} FirstError The first turn that failed with an error of a kind; "" is any. */
/** @typedef {{group: string, step: string, run: string}} Labels Those that are wanted; "" is any. */

/**
 * @typedef {{screen: "episodes"}
 *   | {screen: "live"}
 *   | {screen: "forks", eid: string}
 *   | {screen: "compare", eids: [string, string]}
 *   | {screen: "group", labels: Labels}
 *   | {screen: "episode", eid: string, t: number | FirstError | null}} Place
 */

/**
 * Return what a fragment of an address names. Screens have names that no eid has.
 * @param {string} hash With its #.
 * @returns {Place}
 */
export function placeOf(hash) {
  if (hash.startsWith("#group?")) {
    const asked = new URLSearchParams(hash.slice("#group?".length));
    const [group, step, run] = ["group", "step", "run"].map((name) => asked.get(name) ?? "");
    return { screen: "group", labels: { group, step, run } };
  }
  const [first, second, third] = hash.slice(1).split("/").map(decoded);
  if (first === "") return { screen: "episodes" };
  if (first === "live") return { screen: "live" };
  if (first === "forks" && second) return { screen: "forks", eid: second };
  if (first === "compare" && second && third) return { screen: "compare", eids: [second, third] };
  if (second === "error") return { screen: "episode", eid: first, t: { kind: third ?? "" } };
  return { screen: "episode", eid: first, t: /^[0-9]{1,15}$/.test(second ?? "") ? Number(second) : null };
}

/**
 * Return the address of the rollouts that have an episode's labels.
 * @param {{group: string | null, step: number | null, run: string | null}} labels
 */
export function groupHash({ group, step, run }) {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries({ run, step, group })) if (value !== null && value !== undefined) asked.set(name, String(value));
  return `#group?${asked}`;
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
