/** A list of episodes that stays up to date: rows change where they stand, and new ones wait until they are asked for. */

import * as api from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { serial } from "./serial.js";
import { Stream, follow, statusAfter } from "./stream.js";

const PACE_MS = 2000;
const FIRST = 100;
const MOST = 500;

/**
 * Follow a list.
 * @param {Record<string, string | null>} query Filters and order.
 * @param {string} search The same, as text.
 * @param {api.Episode[]} listed What is shown.
 * @param {(change: (before: api.Episode[]) => api.Episode[]) => void} setListed
 * @returns How many are new, the eids that are listed no more, and how the stream is.
 */
export function useLiveList(query, search, listed, setListed) {
  const shown = useRef(listed);
  shown.current = listed;
  const [newest, setNewest] = useState({ eids: /** @type {string[]} */ ([]), limit: FIRST });
  const [gone, setGone] = useState(/** @type {Set<string>} */ (new Set()));
  const [state, setState] = useState(/** @type {import("./stream.js").StreamState} */ (""));
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    const leaving = new AbortController();
    /** @type {Set<string>} */
    const left = new Set();
    setNewest({ eids: [], limit: FIRST });
    setGone(new Set());
    const read = async () => {
      const limit = Math.min(MOST, Math.max(FIRST, shown.current.length));
      const { episodes, next } = await api.episodes({ ...query, limit }, leaving.signal);
      if (leaving.signal.aborted) return;
      const fresh = new Map(episodes.map((episode) => [episode.eid, episode]));
      const old = new Set(shown.current.map((episode) => episode.eid));
      const count = episodes.filter((episode) => !old.has(episode.eid)).length;
      // New ones push as many from the end of the page, so of the rows before those a missing one is listed no more.
      const sure = next === null ? shown.current.length : limit - count;
      shown.current.slice(0, sure).forEach(({ eid }) => (fresh.has(eid) ? left.delete(eid) : left.add(eid)));
      setGone(new Set(left));
      setNewest({ eids: [...fresh.keys()], limit });
      setListed((before) => before.map((episode) => fresh.get(episode.eid) ?? episode));
    };
    const again = serial(read, setTrouble, leaving.signal, PACE_MS);
    const take = (/** @type {import("./stream.js").Happened} */ event) => {
      const changed = (/** @type {api.Episode} */ one) => statusAfter(one, event) !== one.status;
      setListed((before) => (before.some(changed) ? before.map((one) => ({ ...one, status: statusAfter(one, event) })) : before));
      again();
    };
    const stop = follow({ environment: query.environment }, { list: again, episode: take, state: setState });
    return () => {
      leaving.abort();
      stop();
    };
  }, [search]);
  const old = new Set(listed.map((episode) => episode.eid));
  const count = newest.eids.filter((eid) => !old.has(eid)).length;
  return { count, more: count === newest.limit, gone, state, trouble };
}

/**
 * Says how many episodes are new, and shows them.
 * @param {{live: ReturnType<typeof useLiveList>, show: () => void}} properties
 */
export function News({ live, show }) {
  const { count, more } = live;
  return html`<p class="newer">
    <${Stream} state=${live.state} failure=${live.trouble} />
    ${count > 0 && html`<button class="news" onClick=${show}>${count}${more ? " or more" : ""} new</button>`}
  </p>`;
}
