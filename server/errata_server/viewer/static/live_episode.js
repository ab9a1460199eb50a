/** An episode that grows while it is looked at: its turns are read once each, and by cursor. */

import * as api from "./api.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { serial } from "./serial.js";
import { follow, isRunning, statusAfter } from "./stream.js";

/**
 * Load an episode and its turns, which are shown as they come, and those that come later.
 * @param {string} eid
 */
export function useEpisode(eid) {
  const [summary, setSummary] = useState(/** @type {api.Episode | null} */ (null));
  const [turns, setTurns] = useState(/** @type {api.Turn[]} */ ([]));
  const [complete, setComplete] = useState(false);
  const [failure, setFailure] = useState("");
  const [trouble, setTrouble] = useState("");
  const [stream, setStream] = useState(/** @type {import("./stream.js").StreamState} */ (""));
  useEffect(() => {
    const leaving = new AbortController();
    /** @type {api.Episode | null} */
    let found = null;
    /** @type {api.Turn[]} */
    let known = [];
    let outdated = false;
    let recount = false; // more late rewards came than an event has
    /** @type {Set<number>} */
    const rewarded = new Set();
    let stop = () => {};
    /** A fork's first delivery is its parent's: what made it is no action of an agent. */
    const own = (/** @type {api.Turn} */ turn) => {
      const origin = turn.t === 0 ? found?.origin : null;
      return origin ? { ...turn, kind: "fork", action: `of ${origin.eid} at t=${origin.t}`, action_cut: false } : turn;
    };
    const show = (/** @type {api.Episode} */ episode) => setSummary((found = episode));
    const read = async () => {
      if (outdated) {
        outdated = false;
        show(await api.summary(eid, leaving.signal).catch((error) => {
          outdated = true;
          throw error;
        }));
      }
      const cursor = known.length === 0 ? null : String(known[known.length - 1].t);
      for await (const page of api.turns(eid, cursor, leaving.signal)) {
        const last = known.length === 0 ? -1 : known[known.length - 1].t;
        setTurns((known = [...known, ...page.turns.filter((turn) => turn.t > last).map(own)]));
      }
      if (recount) {
        recount = false;
        const counts = new Map();
        for (const { t } of await api.rewards(eid, leaving.signal).catch((error) => {
          recount = true;
          throw error;
        })) counts.set(t, (counts.get(t) ?? 0) + 1);
        rewarded.clear();
        setTurns((known = known.map((turn) => ({ ...turn, late_rewards: counts.get(turn.t) ?? 0 }))));
      }
      for (const t of rewarded) {
        const turn = own(await api.turn(eid, t, leaving.signal));
        rewarded.delete(t);
        setTurns((known = known.map((one) => (one.t === t ? turn : one))));
      }
      setComplete(true);
    };
    const deleted = () => {
      leaving.abort();
      stop();
      setFailure("the episode was deleted");
    };
    // It may be read before the event of its deletion is there.
    const reread = () => read().catch((error) => {
      if (!(error instanceof api.Refused) || error.status !== 404) throw error;
      deleted();
    });
    const again = serial(reread, setTrouble, leaving.signal);
    const take = (/** @type {import("./stream.js").Happened} */ event) => {
      if (event.eid === eid && event.what.includes("deleted")) return deleted();
      if (event.eid === eid && event.what.includes("rewarded")) {
        if (event.late_rewards) for (const { t } of event.late_rewards) rewarded.add(t);
        else recount = true;
      }
      if (found !== null) show({ ...found, done: found.done || (event.eid === eid && event.done === true), status: statusAfter(found, event) });
      again();
    };
    setSummary(null);
    setTurns([]);
    setComplete(false);
    setFailure("");
    setTrouble("");
    setStream("");
    (async () => {
      show(await api.episode(eid, leaving.signal));
      await read();
      if (leaving.signal.aborted || found === null || !isRunning(found)) return;
      const list = () => {
        outdated = true;
        again();
      };
      stop = follow({ eid }, { list, episode: take, state: setStream });
    })().catch((error) => leaving.signal.aborted || setFailure(error.message));
    return () => {
      leaving.abort();
      stop();
    };
  }, [eid]);
  const current = useMemo(() => summary && (complete ? totalled(summary, turns) : summary), [summary, turns, complete]);
  return { summary: current, turns, complete, failure, trouble, stream };
}

/**
 * Return an episode with the sums of its turns: events have none.
 * @param {api.Episode} episode
 * @param {api.Turn[]} turns All of its turns.
 * @returns {api.Episode}
 */
function totalled(episode, turns) {
  if (turns.length <= episode.deliveries) return episode;
  /** @type {Record<string, number>} */
  const error_kinds = {};
  let reward = 0;
  for (const turn of turns) {
    reward += Number.isFinite(turn.reward) ? Number(turn.reward) : 0;
    if (turn.error_kind !== null) error_kinds[turn.error_kind] = (error_kinds[turn.error_kind] ?? 0) + 1;
  }
  return { ...episode, deliveries: turns.length, reward, error_kinds, last: turns[turns.length - 1].created };
}

/**
 * Stay at the end of an episode that grows, for a reader who stands there.
 * @param {api.Turn[]} turns
 * @param {number} chosen
 * @param {boolean} complete Whether all turns of before are there.
 * @param {(index: number) => void} choose
 * @returns {number} How many turns came behind the end at which the reader does not stand.
 */
export function useEnd(turns, chosen, complete, choose) {
  const end = useRef(-1);
  const [seen, setSeen] = useState(0);
  const last = turns.length - 1;
  useEffect(() => {
    if (!complete) end.current = -1;
    else {
      const stays = end.current !== -1 && chosen === end.current && last > end.current;
      if (end.current === -1 || stays || chosen === last) setSeen(last);
      end.current = last;
      if (stays) choose(last);
    }
  }, [turns, chosen, complete]);
  return complete ? Math.max(0, last - seen) : 0;
}

/**
 * Says that turns came, and leads to the newest.
 * @param {{count: number, go: () => void}} properties
 */
export function NewTurns({ count, go }) {
  return count > 0 ? html`<button class="news" onClick=${go}>${count} new ${count === 1 ? "turn" : "turns"}</button>` : null;
}
