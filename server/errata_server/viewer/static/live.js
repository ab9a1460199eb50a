/** The screen of what fails now: of each running episode that failed the newest turn with an error. */

import * as api from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { Plain } from "./output.js";
import { serial } from "./serial.js";
import { Stream, follow, isRunning, statusAfter } from "./stream.js";
import { duration, number, oneLine } from "./text.js";

const PACE_MS = 1000;
/** Most running episodes that are looked at: those with the latest deliveries. */
const EPISODES = 100;
/** Most cards. */
const CARDS = 24;
/** Most turns of one episode, from its end, among which its newest error is looked for when the screen opens. */
const BACK = 100;

/** @typedef {{episode: api.Episode, turn: api.Turn}} Card */

export function LiveScreen() {
  const { cards, running, read, state, trouble, hold, waits } = useFailures();
  return html`
    <main class="live">
      <h1>Failing now <small>the newest error of each running episode</small></h1>
      <p class="newer">
        <${Stream} state=${state} failure=${trouble} />
        ${waits && html`<span>changes wait while you point at a card</span>`}
        ${read && html`<a href="?status=open&sort=last">${running} running</a>`}
      </p>
      ${read && cards.length === 0 && html`<p class="none">no running episode has failed</p>`}
      <ul class="wall" aria-label="Failing now" onMouseEnter=${() => hold("mouse", true)} onMouseLeave=${() => hold("mouse", false)}
        onFocusIn=${() => hold("focus", true)} onFocusOut=${() => hold("focus", false)}>
        ${cards.map((card) => html`<${Failure} key=${card.episode.eid} ...${card} />`)}
      </ul>
    </main>
  `;
}

/** @param {Card} properties */
function Failure({ episode, turn }) {
  return html`
    <li>
      <a href=${`#${episode.eid}/${turn.t}`}>
        <strong><${Plain} text=${turn.error_kind ?? ""} /></strong>
        <span><${Plain} text=${episode.task ?? episode.environment} /></span>
        <code><${Plain} text=${oneLine(turn.action)} /></code>
        <small>${episode.eid} t=${turn.t}${episode.deliveries - 1 > turn.t ? `, now at t=${episode.deliveries - 1}` : ""}, ${duration(Date.now() / 1000 - (turn.created ?? 0))} ago, reward ${number(episode.reward)}</small>
      </a>
    </li>
  `;
}

/**
 * Return of each session the episode that was begun last: with a reset those of before are over.
 * @param {api.Episode[]} open
 */
function latest(open) {
  /** @type {Map<string, number>} */
  const begun = new Map();
  for (const { session, created } of open) begun.set(session, Math.max(created, begun.get(session) ?? 0));
  return open.filter(({ session, created }) => created === begun.get(session));
}

/** Follow the errors of running episodes. Cards do not move while a pointer or the keyboard is among them. */
function useFailures() {
  const [shown, setShown] = useState({ cards: /** @type {Card[]} */ ([]), running: "0", read: false });
  const [state, setState] = useState(/** @type {import("./stream.js").StreamState} */ (""));
  const [trouble, setTrouble] = useState("");
  const [waits, setWaits] = useState(false);
  const held = useRef({ mouse: false, focus: false, update: () => {} });
  useEffect(() => {
    const leaving = new AbortController();
    /** @type {Map<string, Card>} */
    const cards = new Map();
    /** @type {Map<string, number>} The newest error of episodes, by events. At t=0 it is that of a fork's parent. */
    const marked = new Map();
    const read = async () => {
      const { episodes: open, next } = await api.episodes({ status: "open", sort: "last", limit: EPISODES }, leaving.signal);
      const episodes = latest(open);
      const running = new Map(episodes.map((episode) => [episode.eid, episode]));
      const left = (/** @type {Card} */ { episode }) => !running.has(episode.eid) && (next === null || open.some(({ session }) => session === episode.session));
      for (const [eid, card] of cards) if (left(card)) cards.delete(eid);
      const failed = episodes.filter((episode) => Object.keys(episode.error_kinds).length > 0).slice(0, CARDS);
      const found = await Promise.all(failed.map((episode) => newest(episode, cards.get(episode.eid)?.turn, marked.get(episode.eid))));
      failed.forEach((episode, index) => {
        const turn = found[index];
        if (turn !== null) cards.set(episode.eid, { episode, turn });
      });
      const last = [...cards.values()].sort((one, other) => (other.turn.created ?? 0) - (one.turn.created ?? 0)).slice(0, CARDS);
      cards.clear();
      for (const card of last) cards.set(card.episode.eid, card);
      for (const eid of marked.keys()) if (!running.has(eid)) marked.delete(eid);
      const update = () => {
        setWaits(false);
        setShown({ cards: last, running: `${episodes.length}${next === null ? "" : " or more"}`, read: true });
      };
      held.current.update = update;
      if (!held.current.mouse && !held.current.focus) update();
      else setWaits(true);
    };
    /**
     * Return the newest turn of an episode that failed; null where it is further from the end than is looked.
     * @param {api.Episode} episode
     * @param {api.Turn | undefined} known The newest that was known before.
     * @param {number | undefined} t That of an event, which is newer.
     */
    const newest = async ({ eid, deliveries }, known, t) => {
      if (t !== undefined) return t === known?.t ? known : api.turn(eid, t, leaving.signal);
      if (known !== undefined) return known;
      const url = api.turnsAddress(eid, BACK, deliveries > BACK ? String(deliveries - BACK - 1) : null);
      const page = await (await api.ask(url, leaving.signal)).json();
      return page.turns.findLast((/** @type {api.Turn} */ turn) => turn.error_kind !== null && turn.kind !== "reset") ?? null;
    };
    const again = serial(read, setTrouble, leaving.signal, PACE_MS);
    const take = (/** @type {import("./stream.js").Happened} */ event) => {
      const { eid } = event;
      if (eid !== null && event.error_t) marked.set(eid, event.error_t);
      for (const { episode } of cards.values()) {
        const status = statusAfter(episode, event);
        if (!isRunning({ done: episode.done, status })) cards.delete(episode.eid);
      }
      if (event.what.some((what) => what !== "delivered")) again();
    };
    const list = () => {
      cards.clear();
      marked.clear();
      again();
    };
    again();
    const stop = follow({}, { list, episode: take, state: setState });
    return () => {
      leaving.abort();
      stop();
    };
  }, []);
  const hold = (/** @type {"mouse" | "focus"} */ by, /** @type {boolean} */ on) => {
    held.current[by] = on;
    if (!held.current.mouse && !held.current.focus) held.current.update();
  };
  return { ...shown, state, trouble, hold, waits };
}
