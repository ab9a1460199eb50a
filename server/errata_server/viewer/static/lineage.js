/** The whole history of an episode: of a fork, first that of its parent up to where it was forked. */

import * as api from "./api.js";

/** Most ancestors that a history has. */
const ANCESTORS = 64;

/**
 * @typedef {object} Part An episode's turns in a history.
 * @property {api.Episode} episode
 * @property {number | null} until The last t that belongs to it; null of the last part.
 * @property {number} base Place of its t=0 in the history.
 */

/** @typedef {{place: number, eid: string, turn: api.Turn}} Held */

/**
 * Return the parts of an episode's history, the oldest first.
 * @param {string} eid
 * @param {AbortSignal} signal
 * @returns {Promise<Part[]>}
 */
export async function lineage(eid, signal) {
  let episode = await api.summary(eid, signal);
  /** @type {Part[]} */
  const parts = [{ episode, until: null, base: 0 }];
  while (episode.origin !== null && parts.length <= ANCESTORS) {
    const parent = await api.listed(episode.origin.eid, signal);
    if (parent === null) break;
    parts.unshift({ episode: parent, until: episode.origin.t, base: 0 });
    episode = parent;
  }
  parts.forEach((part, index) => {
    if (index > 0) part.base = parts[index - 1].base + Number(parts[index - 1].until);
  });
  return parts;
}

/**
 * Return where two histories part, and put both into the same places.
 * @param {Part[]} one
 * @param {Part[]} other
 * @returns {{shared: number, common: api.Episode | null}} ``shared``: last place that is the same turn in both, -1
 *   where there is none; ``common``: the episode that has it.
 */
export function parting(one, other) {
  let index = 0;
  if (one[0].episode.eid !== other[0].episode.eid) {
    const [first, second] = [one[0].episode.origin, other[0].episode.origin];
    if (first === null || first.eid !== second?.eid || first.t !== second.t) return { shared: -1, common: null };
    for (const part of [...one, ...other]) part.base += first.t; // forks of an episode that is not here any more
    return { shared: first.t, common: null };
  }
  while (one[index].until === other[index].until && one[index + 1]?.episode.eid !== undefined && one[index + 1].episode.eid === other[index + 1]?.episode.eid) index += 1;
  const ends = [one[index], other[index]].map(({ until, episode }) => until ?? episode.deliveries - 1);
  return { shared: one[index].base + Math.min(...ends), common: one[index].episode };
}

/**
 * Yield the turns of a history behind a place.
 * @param {Part[]} parts
 * @param {number} after
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Held>}
 */
export async function* history(parts, after, signal) {
  for (const [index, { episode, until, base }] of parts.entries()) {
    if (until !== null && base + until <= after) continue;
    // The first delivery of a fork is that of its parent from which it was forked.
    const cursor = Math.max(after - base, index === 0 ? -1 : 0);
    for await (const page of api.turns(episode.eid, cursor < 0 ? null : String(cursor), signal)) {
      for (const turn of page.turns) {
        if (until !== null && turn.t > until) break;
        yield { place: base + turn.t, eid: episode.eid, turn };
      }
      if (until !== null && page.turns.length > 0 && page.turns[page.turns.length - 1].t >= until) break;
    }
  }
}
