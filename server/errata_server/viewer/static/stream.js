/** Follows what happens to episodes by the server's stream of events, and shows how that stream is. */

import { address } from "./api.js";
import { html } from "./html.js";
import { isPlayed } from "./offers.js";
import { Plain } from "./output.js";

const AGAIN_MS = 5000;

/**
 * @typedef {object} Happened What an event says (PROTOCOL G).
 * @property {string | null} eid
 * @property {string} session
 * @property {string} environment
 * @property {string[]} what
 * @property {number | null} t
 * @property {boolean | null} done
 * @property {string | null} error_kind
 * @property {number | null} error_t
 * @property {number | null} late_t
 * @property {{t: number, value: number}[] | null} [late_rewards] Null: more than the server keeps.
 * @property {string | null} status
 */

/** @typedef {"" | "connecting" | "live" | "lost" | "refused" | "files"} StreamState */

const SAID = new Map([
  ["", ""],
  ["connecting", "connecting"],
  ["live", "live"],
  ["lost", "connection lost, connecting again"],
  ["refused", "the server refuses a live stream: tried again, and read without it, every 5 s"],
  ["files", "files: read again every 5 s"],
]);

/** @type {Set<string>} */
const RUNNING = new Set(["open", "detached"]);

/**
 * Return whether more can happen in an episode.
 * @param {{done: boolean, status: string | null}} episode
 */
export function isRunning({ done, status }) {
  return !done && status !== null && RUNNING.has(status);
}

/**
 * Return the status of an episode after an event, which may be of another one of its session.
 * @param {{eid: string, session: string, done: boolean, status: string | null}} episode
 * @param {Happened} event
 */
export function statusAfter(episode, event) {
  const own = event.eid === episode.eid;
  if (own && event.what.includes("deleted")) return "deleted";
  if (episode.done || (own && event.done)) return "done";
  return event.session === episode.session ? (event.status ?? episode.status) : episode.status;
}

/**
 * Follow episodes while the page can be seen: a browser keeps few connections to one server, for all its tabs.
 * @param {Record<string, string | null>} parameters Of the stream: which episodes.
 * @param {{list: () => void, episode: (event: Happened) => void, state: (state: StreamState) => void}} on ``list`` is
 *   called where everything has to be read again.
 * @returns {() => void} Ends it.
 */
export function follow(parameters, on) {
  /** @type {EventSource | null} */
  let source = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let later;
  let ended = false;
  const close = () => {
    clearTimeout(later);
    source?.close();
    source = null;
  };
  const poll = () => {
    on.state("files");
    on.list();
    later = setTimeout(poll, AGAIN_MS);
  };
  const listen = () => {
    const opened = new EventSource(address("episodes/events", parameters));
    source = opened;
    opened.onopen = () => on.state("live");
    opened.addEventListener("list", () => on.list());
    opened.addEventListener("episode", (message) => on.episode(JSON.parse(message.data)));
    opened.onerror = () => {
      // One that is not closed was lost, and the browser opens it again, behind the last event that it had.
      if (opened.readyState !== EventSource.CLOSED) return on.state("lost");
      close();
      on.state("refused");
      on.list();
      later = setTimeout(listen, AGAIN_MS);
    };
  };
  const open = async () => {
    close();
    if (document.hidden) return;
    on.state("connecting");
    const played = await isPlayed().catch(() => true); // the stream says then what is wrong
    if (ended || document.hidden || source !== null) return;
    if (played) listen();
    else later = setTimeout(poll, AGAIN_MS);
    if (!played) on.state("files");
  };
  document.addEventListener("visibilitychange", open);
  open();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", open);
    close();
  };
}

/**
 * How a stream is, for people.
 * @param {{state: StreamState, failure?: string}} properties ``failure``: why the page could not be read again.
 */
export function Stream({ state, failure = "" }) {
  return html`<span class=${`stream ${state}`} role="status">${SAID.get(state)}${failure && html` (<${Plain} text=${failure} />: tried again)`}</span>`;
}
