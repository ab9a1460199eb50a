/** The screen of one episode: its strip, its turns, and the turn that is looked at. */

import * as api from "./api.js";
import { ForkHere } from "./fork_here.js";
import { GroupLink } from "./group.js";
import { html, useCallback, useEffect, useRef, useState } from "./html.js";
import { KindLinks } from "./kinds.js";
import { NewTurns, useEnd, useEpisode } from "./live_episode.js";
import { Plain, Trouble } from "./output.js";
import { SearchField, useSearch } from "./search.js";
import { Status } from "./status.js";
import { Stream } from "./stream.js";
import { Strip } from "./strip.js";
import { duration, number } from "./text.js";
import { Timeline } from "./timeline.js";
import { TurnDetail, VIEWS } from "./turn.js";

/** What keys do, as the screen says it. */
const KEYS = [
  ["j k \u2193 \u2191", "next and previous turn"],
  ["n p", "next and previous error; of a search, action that has it"],
  ["/", "find in actions, Esc ends it"],
  ["a", "agent text, fields, raw"],
  ["Home End", "first and last turn"],
];

/**
 * @param {{eid: string, t: number | import("./address.js").FirstError | null}} properties
 */
export function EpisodeScreen({ eid, t }) {
  const { summary, turns, complete, failure, trouble, stream } = useEpisode(eid);
  const [wanted, setView] = useState(/** @type {string | null} */ (null));
  const [usual, setUsual] = useState(VIEWS[0]);
  const view = wanted ?? usual;
  const found = t === null ? -1 : turns.findIndex(typeof t === "number" ? (turn) => turn.t === t : (turn) => isError(turn, t.kind));
  const chosen = Math.max(0, found);
  const choose = useCallback((/** @type {number} */ index) => {
    if (turns[index] !== undefined) history.replaceState(null, "", `#${eid}/${turns[index].t}`);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }, [eid, turns]);
  const news = useEnd(turns, chosen, complete, choose);
  const search = useSearch(turns, summary?.deliveries ?? 0, complete, chosen, choose);
  useKeys(turns, chosen, choose, search, () => setView(VIEWS[(VIEWS.indexOf(view) + 1) % VIEWS.length]));
  if (failure) return html`<main><${Trouble} text=${failure} /></main>`;
  if (summary === null) return html`<main><p class="none">loading <${Plain} text=${eid} /></p></main>`;
  return html`
    <main class="episode">
      <${Heading} episode=${summary} />
      ${stream && html`<p class="newer"><${Stream} state=${stream} failure=${trouble} /><${NewTurns} count=${news} go=${() => choose(turns.length - 1)} /></p>`}
      <${SearchField} search=${search} />
      <${Strip} turns=${turns} chosen=${chosen} choose=${choose} />
      <div class="panes">
        <${Timeline} turns=${turns} chosen=${chosen} choose=${choose} />
        <section class="detail" aria-label="The chosen turn">
          ${turns[chosen] && (t === null || found !== -1) && html`<${ForkHere} eid=${eid} environment=${summary.environment} turn=${turns[chosen]} next=${turns[chosen + 1]} />`}
          ${turns[chosen] === undefined
            ? html`<p class="none">no turns</p>`
            : t !== null && found === -1
              ? html`<p class="none">${typeof t === "number" ? `no turn ${t} yet` : complete ? "no turn failed so" : "looking for the first error"}</p>`
              : html`<${TurnDetail} eid=${eid} turn=${turns[chosen]} view=${view} setView=${setView} setUsual=${setUsual} />`}
        </section>
      </div>
      <p class="keys">${KEYS.map(([keys, what]) => html`<span><kbd>${keys}</kbd> ${what}</span>`)}</p>
    </main>
  `;
}

/**
 * Return whether a turn failed with an error of its own, of a kind or of any.
 * @param {api.Turn} turn
 * @param {string} kind
 */
function isError({ kind: request, error_kind }, kind) {
  return error_kind !== null && request !== "fork" && (kind === "" || error_kind === kind);
}

/** @param {{episode: api.Episode}} properties */
function Heading({ episode }) {
  const facts = [
    ["environment", episode.environment],
    ["task", episode.task],
    ["reward", number(episode.reward)],
    ["turns", `${episode.deliveries}${episode.deliveries > 1 ? `, t=0 to ${episode.deliveries - 1}` : ""}`],
    ["began", new Date(episode.created * 1000).toLocaleString()],
    ["first to last turn", episode.last === null ? "" : duration(episode.last - episode.created)],
    ["episode_id", episode.episode_id],
    ["run", episode.run],
    ["step", episode.step === null || episode.step === undefined ? "" : String(episode.step)],
  ];
  return html`
    <header>
      <h1><${Plain} text=${episode.task ?? episode.environment} /> <small>${episode.eid}</small></h1>
      <dl class="facts">
        ${facts.filter(([, value]) => value).map(([name, value]) => html`<div><dt>${name}</dt><dd><${Plain} text=${value} /></dd></div>`)}
        <div><dt>errors</dt><dd>${Object.keys(episode.error_kinds).length > 0 ? html`<${KindLinks} episode=${episode} />` : "none"}</dd></div>
        <div><dt>status</dt><dd><${Status} status=${episode.status} /></dd></div>
        ${episode.group && html`<div><dt>group</dt><dd><${GroupLink} episode=${episode} name=${episode.group} /></dd></div>`}
        ${episode.origin && html`<div><dt>forked from</dt><dd><a href=${`#${episode.origin.eid}/${episode.origin.t}`}>${episode.origin.eid} at t=${episode.origin.t}</a></dd></div>`}
        <${Forks} eid=${episode.eid} />
      </dl>
    </header>
  `;
}

/**
 * The forks of an episode, by the turns that they begin at.
 * @param {{eid: string}} properties
 */
function Forks({ eid }) {
  const [page, setPage] = useState(/** @type {api.EpisodePage | null} */ (null));
  useEffect(() => {
    const leaving = new AbortController();
    api.episodes({ origin: eid, limit: 20 }, leaving.signal).then(setPage, () => {}); // the screen itself says what is wrong
    return () => leaving.abort();
  }, [eid]);
  if (page === null || page.episodes.length === 0) return null;
  const at = [...new Set(page.episodes.map(({ origin }) => origin?.t ?? 0))].sort((one, other) => one - other);
  return html`<div><dt>forks</dt><dd><a href=${`#forks/${eid}`}>${page.episodes.length}${page.next === null ? "" : " or more"}</a>, at ${at.map((t, index) => html`${index > 0 && ", "}<a href=${`#${eid}/${t}`}>t=${t}</a>`)}</dd></div>`;
}

/**
 * @param {api.Turn[]} turns
 * @param {number} chosen
 * @param {(index: number) => void} choose
 * @param {ReturnType<typeof useSearch>} search
 * @param {() => void} toggle
 */
function useKeys(turns, chosen, choose, search, toggle) {
  const now = useRef({ turns, chosen, choose, search, toggle });
  now.current = { turns, chosen, choose, search, toggle };
  useEffect(() => {
    const press = (/** @type {KeyboardEvent} */ event) => {
      const { turns, chosen, choose, search, toggle } = now.current;
      if (event.ctrlKey || event.metaKey || event.altKey || /** @type {HTMLElement} */ (event.target).closest("input, select, textarea")) return;
      const failed = (/** @type {api.Turn} */ turn) => turn.error_kind !== null;
      const next = turns.findIndex((turn, index) => index > chosen && failed(turn));
      const previous = turns.slice(0, chosen).findLastIndex(failed);
      const moves = new Map([
        ["j", chosen + 1], ["ArrowDown", chosen + 1], ["k", chosen - 1], ["ArrowUp", chosen - 1],
        ["n", next], ["p", previous], ["Home", 0], ["End", turns.length - 1],
      ]);
      if (event.key === "a") toggle();
      if (event.key === "/") {
        event.preventDefault();
        const field = /** @type {HTMLInputElement} */ (document.getElementById("search"));
        field.focus();
        field.select();
        return;
      }
      if (search.text !== "") {
        if (event.key === "Escape") return search.type("");
        const onward = event.key === "n" || (event.key === "Enter" && /** @type {HTMLElement} */ (event.target).closest("button, a, summary") === null);
        if (onward || event.key === "p") return search.seek(onward ? 1 : -1);
      }
      const index = moves.get(event.key);
      if (index === undefined || turns[index] === undefined) return;
      event.preventDefault();
      choose(index);
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}
