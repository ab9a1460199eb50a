/** The screen of a group: all rollouts that have the same labels, by reward, and where each leaves the best one. */

import * as api from "./api.js";
import { groupHash } from "./address.js";
import { sameAction } from "./differences.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { Kinds } from "./kinds.js";
import { Plain, Trouble } from "./output.js";
import { Status } from "./status.js";
import { number, oneLine } from "./text.js";

/** Rollouts that are added at a time. */
const ROLLOUTS = 64;
/** First turns of each that are looked at. */
const TURNS = 200;
const AT_ONCE = 4;
/** Most and least width of a turn's bar, all bars of a rollout, and height, CSS pixels. */
const [WIDE, NARROW, ALL, HEIGHT] = [12, 4, 240, 22];

/** @typedef {import("./address.js").Labels} Labels */
/**
 * @typedef {object} Rollout
 * @property {api.Episode} episode
 * @property {api.Turn[] | null} turns Its first ones; null until they are read.
 */

/** @param {{labels: Labels}} properties */
export function GroupScreen({ labels }) {
  const { rollouts, next, total, failure, loading, more } = useGroup(labels);
  const best = rollouts.find(({ episode }) => episode.origin === null) ?? rollouts[0];
  const said = Object.entries(labels).filter(([, value]) => value !== "");
  const longest = Math.max(1, ...rollouts.map(({ turns }) => turns?.length ?? 0));
  const bar = Math.max(NARROW, Math.min(WIDE, Math.floor(ALL / longest)));
  const own = rollouts.filter(({ episode }) => episode.origin === null);
  const forks = rollouts.length - own.length;
  const mean = own.reduce((sum, { episode }) => sum + episode.reward, 0) / own.length;
  return html`
    <main class="group">
      <h1>Group <small>${said.map(([name, value]) => html`${name} <b><${Plain} text=${value} /></b> `)}</small></h1>
      ${failure && html`<${Trouble} text=${failure} />`}
      <p role="status" class="none">${loading ? "loading " : ""}${said.length === 0 ? "the address names no label" : `${own.length}${total} rollouts${own.length > 0 ? `, mean reward ${number(mean)}, most ${number(own[0].episode.reward)}, least ${number(own[own.length - 1].episode.reward)}` : ""}${forks > 0 ? `; ${forks} ${forks === 1 ? "fork" : "forks"} beside them` : ""}`}</p>
      ${rollouts.length > 0 && html`
        <div class="scrolls" tabindex="0" role="region" aria-label="Rollouts">
          <table>
            <thead><tr>${["reward", "episode", "turns", "status", "first error", "errors", "leaves the best at", "turns by reward and error, marked where it leaves"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
            <tbody>${rollouts.map((rollout) => html`<${Row} key=${rollout.episode.eid} rollout=${rollout} best=${best} bar=${bar} />`)}</tbody>
          </table>
        </div>`}
      ${next !== null && html`<button disabled=${loading} onClick=${more}>more</button>`}
    </main>
  `;
}

/** @param {{rollout: Rollout, best: Rollout, bar: number}} properties ``bar``: width of a turn's bar, CSS pixels. */
function Row({ rollout: { episode, turns }, best, bar }) {
  const failed = turns?.find((turn) => turn.error_kind !== null);
  const fork = (episode.origin ?? best.episode.origin) !== null; // its turns are those behind its parent's
  const leaves = turns === null || best.turns === null || fork ? null : parting(turns, best.turns);
  return html`
    <tr>
      <td class="count">${number(episode.reward)}</td>
      <td><a href=${`#${episode.eid}`}>${episode.eid}</a></td>
      <td class="count">${episode.deliveries}</td>
      <td><${Status} status=${episode.status} /></td>
      <td>${failed ? html`<a href=${`#${episode.eid}/${failed.t}`}>t=${failed.t} <${Plain} text=${failed.error_kind ?? ""} /></a>` : turns === null ? "" : Object.keys(episode.error_kinds).length > 0 ? `after t=${turns.length - 1}` : "none"}</td>
      <td class="kinds"><${Kinds} episode=${episode} /></td>
      <td class="leaves">${episode.eid === best.episode.eid ? "the best" : fork ? html`a fork${episode.origin && html` of <a href=${`#${episode.origin.eid}/${episode.origin.t}`}>${episode.origin.eid} at t=${episode.origin.t}</a>`} <${Compare} eid=${episode.eid} best=${best} />` : leaves && html`<${Leaves} eid=${episode.eid} leaves=${leaves} best=${best} />`}</td>
      <td>${turns && html`<${Bars} bar=${bar} turns=${turns} leaves=${leaves?.t ?? null} label=${`${episode.eid}: ${turns.length} turns, ${turns.filter((turn) => turn.error_kind !== null).length} with an error`} />`}</td>
    </tr>
  `;
}

/** @param {{eid: string, best: Rollout}} properties */
function Compare({ eid, best }) {
  return html`<a href=${`#compare/${best.episode.eid}/${eid}`} aria-label=${`compare ${eid} with the best`}>compare</a>`;
}

/** @typedef {{t: number | null, own: api.Turn | undefined, other: api.Turn | undefined, whole: boolean}} Leaving */

/** @param {{eid: string, leaves: Leaving, best: Rollout}} properties */
function Leaves({ eid, leaves: { t, own, other, whole }, best }) {
  const compare = html`<${Compare} eid=${eid} best=${best} />`;
  if (t === null) return html`${whole ? "never: the same actions" : `not in its first ${TURNS} turns`} ${compare}`;
  if (own === undefined) return html`t=${t}: it ends, the best goes on ${compare}`;
  return html`<a href=${`#${eid}/${t}`}>t=${t}</a> <code><${Plain} text=${oneLine(own.action)} /></code>${other ? html` instead of <code><${Plain} text=${oneLine(other.action)} /></code>` : " after the best has ended"} ${compare}`;
}

/**
 * Return where a rollout's actions are not those of another.
 * @param {api.Turn[]} turns
 * @param {api.Turn[]} others
 * @returns {Leaving}
 */
function parting(turns, others) {
  for (let index = 0; index < Math.max(turns.length, others.length); index += 1) {
    const [own, other] = [turns[index], others[index]];
    const cut = (own === undefined && turns.length === TURNS) || (other === undefined && others.length === TURNS);
    if (cut) break;
    if (own === undefined || other === undefined || !sameAction(own, other)) return { t: (own ?? other).t, own, other, whole: true };
  }
  return { t: null, own: undefined, other: undefined, whole: Math.max(turns.length, others.length) < TURNS };
}

/** @param {{bar: number, turns: api.Turn[], leaves: number | null, label: string}} properties */
function Bars({ bar, turns, leaves, label }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  useLayoutEffect(() => {
    if (canvas.current !== null) draw(canvas.current, turns, leaves, bar);
  }, [turns, leaves, bar]);
  return html`<canvas class="rollout" ref=${canvas} width=${turns.length * bar} height=${HEIGHT} role="img" aria-label=${label} />`;
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {api.Turn[]} turns
 * @param {number | null} leaves
 * @param {number} bar
 */
function draw(canvas, turns, leaves, bar) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const style = getComputedStyle(canvas);
  const [plain, error, good, mark] = ["--line", "--error", "--good", "--chosen"].map((name) => style.getPropertyValue(name));
  context.clearRect(0, 0, canvas.width, HEIGHT);
  turns.forEach((turn, index) => {
    const left = index * bar;
    context.fillStyle = turn.error_kind === null ? plain : error;
    context.fillRect(left, HEIGHT - 10, bar - 1, 10);
    if (turn.reward) {
      context.fillStyle = turn.reward > 0 ? good : error;
      context.fillRect(left, 3, bar - 1, 7);
    }
    if (turn.t === leaves) {
      context.fillStyle = mark;
      context.fillRect(left, 0, bar - 1, 2);
      context.fillRect(left, HEIGHT - 2, bar - 1, 2);
    }
  });
}

/**
 * A link from an episode to those that have its labels; nothing where it has no group.
 * @param {{episode: api.Episode, name: string}} properties ``name``: text of the link.
 */
export function GroupLink({ episode, name }) {
  return episode.group === null || episode.group === undefined ? null : html`<a href=${groupHash(episode)}><${Plain} text=${name} /></a>`;
}

/** @param {Labels} labels */
function useGroup(labels) {
  const [rollouts, setRollouts] = useState(/** @type {Rollout[]} */ ([]));
  const [next, setNext] = useState(/** @type {string | null} */ (null));
  const [failure, setFailure] = useState("");
  const [loading, setLoading] = useState(true);
  const act = useRef(() => {});
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    /** @type {Rollout[]} */
    let known = [];
    /** @type {string | null} */
    let cursor = null;
    const pull = async () => {
      const page = await api.episodes({ ...labels, sort: "reward", limit: ROLLOUTS, cursor }, signal);
      cursor = page.next;
      setNext(cursor);
      const added = page.episodes.map((episode) => /** @type {Rollout} */ ({ episode, turns: null }));
      setRollouts((known = [...known, ...added]));
      const waiting = [...added];
      const read = async () => {
        for (let one = waiting.shift(); one !== undefined; one = waiting.shift()) {
          const { eid } = one.episode;
          const { turns } = await (await api.ask(api.turnsAddress(eid, TURNS, null), signal)).json();
          setRollouts((known = known.map((each) => (each.episode.eid === eid ? { ...each, turns } : each))));
        }
      };
      await Promise.all(Array.from({ length: AT_ONCE }, read));
    };
    act.current = () => {
      setLoading(true);
      setFailure("");
      pull()
        .catch((error) => signal.aborted || setFailure(error.message))
        .finally(() => signal.aborted || setLoading(false));
    };
    setRollouts([]);
    setNext(null);
    if (Object.values(labels).some((value) => value !== "")) act.current();
    else setLoading(false);
    return () => leaving.abort();
  }, [labels.group, labels.step, labels.run]);
  return { rollouts, next, total: next === null ? "" : " or more", failure, loading, more: () => act.current() };
}
