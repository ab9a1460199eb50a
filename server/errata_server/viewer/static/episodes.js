/** The screen of all episodes: what is listed, in which order, and what they add up to. The address has the filters. */

import * as api from "./api.js";
import { FILTERS, Filters, Nothing } from "./filters.js";
import { GroupLink } from "./group.js";
import { html, useEffect, useState } from "./html.js";
import { KindLinks } from "./kinds.js";
import { News, useLiveList } from "./live_list.js";
import { Plain, Trouble } from "./output.js";
import { Status } from "./status.js";
import { Sums } from "./sums.js";
import { duration, number } from "./text.js";

/** Columns, and what the server sorts them by. */
const COLUMNS = [["episode", ""], ["task", ""], ["turns", "deliveries"], ["reward", "reward"], ["status", ""], ["errors", "errors"], ["began", "created"], ["active", "last"]];

/** @param {{search: string}} properties */
export function EpisodesScreen({ search }) {
  const asked = new URLSearchParams(search);
  const query = Object.fromEntries([...FILTERS, "sort", "order"].map((name) => [name, asked.get(name)]));
  const [listed, setListed] = useState(/** @type {api.Episode[]} */ ([]));
  const [next, setNext] = useState(/** @type {string | null} */ (null));
  const [failure, setFailure] = useState("");
  const [loading, setLoading] = useState(true);
  const load = async (/** @type {string | null} */ cursor, /** @type {AbortSignal | undefined} */ signal) => {
    setLoading(true);
    const page = await api.episodes({ ...query, limit: 100, cursor }, signal);
    setListed((before) => (cursor === null ? page.episodes : [...before, ...page.episodes]));
    setNext(page.next);
    setLoading(false);
  };
  const [version, setVersion] = useState(0);
  const live = useLiveList(query, search, listed, setListed);
  useEffect(() => {
    const leaving = new AbortController();
    setFailure("");
    load(null, leaving.signal).catch((error) => leaving.signal.aborted || setFailure(error.message));
    return () => leaving.abort();
  }, [search, version]);
  return html`
    <main class="episodes">
      <h1>Episodes</h1>
      <${Filters} query=${query} search=${search} listed=${listed} />
      <${Sums} query=${query} search=${search} version=${version} />
      <${News} live=${loading ? { ...live, count: 0 } : live} show=${() => setVersion(version + 1)} />
      ${failure && html`<${Trouble} text=${failure} />`}
      <div class="scrolls" tabindex="0" role="region" aria-label="Episodes">
        <table>
          <thead><tr>${COLUMNS.map(([name, sort]) => html`<${Head} name=${name} sort=${sort} search=${search} />`)}</tr></thead>
          <tbody>${listed.map((episode) => html`<${Row} key=${episode.eid} episode=${episode} gone=${live.gone.has(episode.eid)} />`)}</tbody>
        </table>
      </div>
      ${listed.length === 0 && !loading && !failure && html`<${Nothing} query=${query} />`}
      ${next !== null && html`<button disabled=${loading} onClick=${() => load(next, undefined).catch((error) => setFailure(error.message))}>more</button>`}
    </main>
  `;
}

/** @param {{name: string, sort: string, search: string}} properties */
function Head({ name, sort, search }) {
  if (sort === "") return html`<th scope="col">${name}</th>`;
  const asked = new URLSearchParams(search);
  const by = asked.get("sort") ?? "created";
  const down = (asked.get("order") ?? "desc") === "desc";
  const direction = by !== sort ? undefined : down ? "descending" : "ascending";
  asked.set("sort", sort);
  asked.set("order", by === sort && down ? "asc" : "desc");
  return html`<th scope="col" aria-sort=${direction}><a href=${`?${asked}`}>${name}${by === sort ? (down ? " \u2193" : " \u2191") : ""}</a></th>`;
}

/** @param {{episode: api.Episode, gone: boolean}} properties */
function Row({ episode, gone }) {
  const now = Date.now() / 1000;
  return html`
    <tr class=${gone ? "gone" : undefined} title=${gone ? "changed: the filters have it no more" : undefined}>
      <td><a href=${`#${episode.eid}`}>${episode.eid}</a>${episode.origin && html` <a class="badge" href=${`#forks/${episode.eid}`} title=${`forked from ${episode.origin.eid} at t=${episode.origin.t}`}>fork</a>`}</td>
      <td><${Plain} text=${episode.task ?? episode.environment} /> <${GroupLink} episode=${episode} name=${episode.group} /></td>
      <td class="count">${episode.deliveries}</td>
      <td class="count">${number(episode.reward)}</td>
      <td><${Status} status=${episode.status} /></td>
      <td class="kinds"><${KindLinks} episode=${episode} /></td>
      <td title=${new Date(episode.created * 1000).toISOString()}>${duration(now - episode.created)} ago</td>
      <td>${duration(now - (episode.last ?? episode.created))} ago</td>
    </tr>
  `;
}
