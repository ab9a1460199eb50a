/** The screen of two episodes side by side, aligned to what they have in common. */

import { difference } from "./differences.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { Kinds } from "./kinds.js";
import { history, lineage, parting } from "./lineage.js";
import { Plain, Trouble } from "./output.js";
import { number, oneLine } from "./text.js";

/** Rows that are added at a time. */
const ROWS = 200;
/** Most turns that are looked through for the first difference without being asked for. */
const SEARCHED = 2000;
/** Turns before the first difference that are shown although they are the same. */
const BEFORE = 2;

/**
 * @typedef {object} Row
 * @property {number} place
 * @property {(import("./lineage.js").Held | undefined)[]} sides
 * @property {import("./differences.js").Difference} differs
 */

/** @param {{eids: [string, string]}} properties */
export function PairScreen({ eids }) {
  const { found, rows, ended, failure, loading, more } = usePair(eids);
  const [whole, setWhole] = useState(false);
  const first = rows.findIndex(({ differs }) => differs === "action" || differs === "end");
  const outcome = rows.findIndex(({ differs }) => differs === "outcome");
  const marked = first === -1 ? outcome : outcome === -1 ? first : Math.min(first, outcome);
  const skipped = whole ? 0 : Math.max(0, (marked === -1 ? rows.length : marked) - BEFORE);
  return html`
    <main class="pair">
      <h1>Side by side</h1>
      ${failure && html`<${Trouble} text=${failure} />`}
      ${found && html`<p>${found.shared >= 0
        ? html`the same until t=${found.shared}${found.common && html` of <a class="eid" href=${`#${found.common.eid}/${found.shared - found.base}`}>${found.common.eid}</a>`}`
        : "not forked from one another: aligned by t"}. <${Verdict} eids=${eids} rows=${rows} first=${first} outcome=${outcome} ended=${ended} /></p>
        ${found.episodes.some(({ origin }) => origin !== null) && html`<p class="none">t counts from where the oldest ancestor began; rewards, turns and errors in the heads are each episode's own.</p>`}`}
      ${skipped > 0 && html`<button onClick=${() => setWhole(true)}>${skipped} more turns that are the same</button>`}
      ${found && html`
        <table class="sides">
          <thead><tr><th scope="col">t</th>${found.episodes.map((episode) => html`<${Side} episode=${episode} role=${roleOf(episode, found.episodes)} />`)}</tr></thead>
          <tbody>${rows.slice(skipped).map((row, index) => html`<${Turns} key=${row.place} row=${row} mark=${skipped + index === marked} />`)}</tbody>
        </table>`}
      ${!ended && !loading && html`<button onClick=${more}>more</button>`}
      <p class="none" role="status">${loading ? "loading" : ""}</p>
    </main>
  `;
}

/** @param {{eids: [string, string], rows: Row[], first: number, outcome: number, ended: boolean}} properties */
function Verdict({ eids, rows, first, outcome, ended }) {
  const said = [];
  if (outcome !== -1 && (first === -1 || outcome < first)) said.push(`the same action has another outcome at t=${rows[outcome].place}`);
  if (first !== -1) said.push(rows[first].differs === "end" ? `${eids[rows[first].sides.findIndex((side) => side === undefined)]} ends before t=${rows[first].place}, the other goes on` : `another action at t=${rows[first].place}`);
  if (said.length === 0) said.push(ended ? "no difference" : "no difference so far");
  return html`<strong>${said.join(", ")}</strong>`;
}

/**
 * Return what one of two episodes is to the other.
 * @param {import("./api.js").Episode} episode
 * @param {import("./api.js").Episode[]} both
 */
function roleOf({ eid, origin }, both) {
  if (both.some((one) => one.origin?.eid === eid)) return "the parent";
  return both.some((one) => one.eid === origin?.eid) ? `the fork, from t=${origin?.t}` : "";
}

/** @param {{episode: import("./api.js").Episode, role: string}} properties */
function Side({ episode, role }) {
  return html`<th scope="col"><a class="eid" href=${`#${episode.eid}`}>${episode.eid}</a> ${role} <small><${Plain} text=${episode.task ?? episode.environment} />, ${episode.status}, reward ${number(episode.reward)}, ${episode.deliveries} turns <${Kinds} episode=${episode} /></small></th>`;
}

/** @param {{row: Row, mark: boolean}} properties */
function Turns({ row, mark }) {
  const { place, sides, differs } = row;
  return html`
    <tr class=${`${differs} ${mark ? "first" : ""}`}>
      <th scope="row">${place}${mark && html` <small class="mark">first difference</small>`}</th>
      ${sides.map((held) => html`<td>${held && html`<${Cell} held=${held} place=${place} />`}</td>`)}
    </tr>
  `;
}

/** @param {{held: import("./lineage.js").Held, place: number}} properties */
function Cell({ held: { eid, turn }, place }) {
  const facts = [turn.t === place ? null : `its t=${turn.t}`, turn.error_kind, turn.reward === null ? null : `reward ${number(turn.reward)}`, turn.done ? "done" : null].filter((fact) => fact !== null);
  return html`<a href=${`#${eid}/${turn.t}`} aria-label=${`turn ${turn.t} of ${eid}`}><code>${turn.kind === "step" ? "" : `${turn.kind} `}<${Plain} text=${oneLine(turn.action)} /></code></a>
    <small class=${turn.error_kind === null ? "" : "failed"}><${Plain} text=${facts.join(", ")} /></small>`;
}

/** @param {[string, string]} eids */
function usePair(eids) {
  const [found, setFound] = useState(/** @type {{shared: number, base: number, common: import("./api.js").Episode | null, episodes: import("./api.js").Episode[]} | null} */ (null));
  const [rows, setRows] = useState(/** @type {Row[]} */ ([]));
  const [ended, setEnded] = useState(false);
  const [failure, setFailure] = useState("");
  const [loading, setLoading] = useState(true);
  const act = useRef(() => {});
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    /** @type {AsyncGenerator<import("./lineage.js").Held>[]} */
    let sides = [];
    /** @type {Row[]} */
    let known = [];
    const pull = async () => {
      /** @type {Row[]} */
      const added = [];
      while (added.length < ROWS) {
        const next = await Promise.all(sides.map(async (side) => (await side.next()).value));
        const there = next.find((held) => held !== undefined);
        if (there === undefined) break;
        added.push({ place: there.place, sides: next, differs: difference(next[0]?.turn, next[1]?.turn) });
      }
      setRows((known = [...known, ...added]));
      setEnded(added.length < ROWS);
      return added.length === ROWS;
    };
    const guarded = (/** @type {() => Promise<unknown>} */ task) => {
      setLoading(true);
      setFailure("");
      task()
        .catch((error) => signal.aborted || setFailure(error.message))
        .finally(() => signal.aborted || setLoading(false));
    };
    act.current = () => guarded(pull);
    setRows([]);
    setFound(null);
    setEnded(false);
    guarded(async () => {
      const [one, other] = await Promise.all(eids.map((eid) => lineage(eid, signal)));
      const { shared, common } = parting(one, other);
      const base = one.find(({ episode }) => episode === common)?.base ?? 0;
      setFound({ shared, common, base, episodes: [one, other].map((parts) => parts[parts.length - 1].episode) });
      sides = [one, other].map((parts) => history(parts, shared, signal));
      while ((await pull()) && known.every(({ differs }) => differs === "") && known.length < SEARCHED);
    });
    return () => leaving.abort();
  }, eids);
  return { found, rows, ended, failure, loading, more: () => act.current() };
}
