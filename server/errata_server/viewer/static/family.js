/** The screen of an episode's family: the episodes that it was forked from, and its forks, as a tree. */

import * as api from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { Kinds } from "./kinds.js";
import { Plain, Trouble } from "./output.js";
import { Status } from "./status.js";
import { number } from "./text.js";

/** Most ancestors that are read at a time. */
const ANCESTORS = 16;
/** Most forks of an episode that are read at a time. */
const CHILDREN = 20;
/** Most episodes whose forks are read without being asked for. */
const ASKED = 32;
const AT_ONCE = 4;

/**
 * @typedef {object} Member
 * @property {api.Episode} episode
 * @property {string[]} children Those that are known.
 * @property {string | null | undefined} next Where its list of forks goes on; undefined where it was not begun.
 */

/** @param {{eid: string}} properties */
export function FamilyScreen({ eid }) {
  const { members, root, above, failure, loading, up, more } = useFamily(eid);
  const top = members.get(root);
  return html`
    <main class="family">
      <h1>Forks <small>the family of <${Plain} text=${eid} /></small></h1>
      ${failure && html`<${Trouble} text=${failure} />`}
      ${above === "more" && html`<button onClick=${up}>more ancestors</button>`}
      ${above === "gone" && html`<p class="none">the episode that ${root} was forked from is not here</p>`}
      ${top && html`<ul class="tree" aria-label="Family"><${Branch} member=${top} members=${members} chosen=${eid} more=${more} /></ul>`}
      <p class="none" role="status">${loading ? "loading" : members.size === 1 && top?.next === null && top.episode.origin === null ? "this episode has no forks" : `${members.size} episodes`}</p>
    </main>
  `;
}

/** @param {{member: Member, members: Map<string, Member>, chosen: string, more: (eid: string) => void}} properties */
function Branch({ member, members, chosen, more }) {
  const { episode, children, next } = member;
  const { eid, origin } = episode;
  const created = (/** @type {string} */ child) => members.get(child)?.episode.created ?? 0;
  const forks = [...children].sort((one, other) => created(one) - created(other) || (one < other ? -1 : 1));
  return html`
    <li>
      <div class=${`member ${eid === chosen ? "chosen" : ""}`} aria-current=${eid === chosen ? "true" : undefined}>
        <a class="eid" href=${`#${eid}`}>${eid}</a>
        ${origin && html`<span>from <a href=${`#${origin.eid}/${origin.t}`}>t=${origin.t}</a></span>`}
        <span><${Plain} text=${episode.task ?? ""} /></span>
        <span>${episode.deliveries} turns</span> <span>reward ${number(episode.reward)}</span> <${Status} status=${episode.status} />
        <${Kinds} episode=${episode} />
        ${eid !== chosen && html`<a href=${`#compare/${chosen}/${eid}`}>compare</a> <a href=${`#forks/${eid}`} aria-label=${`forks of ${eid}`}>forks</a>`}
      </div>
      ${forks.length > 0 && html`<ul>${forks.map((child) => html`<${Branch} key=${child} member=${members.get(child)} members=${members} chosen=${chosen} more=${more} />`)}</ul>`}
      ${next !== null && html`<button onClick=${() => more(eid)}>${next === undefined ? "its forks" : "more forks"} <span class="eid">${eid}</span></button>`}
    </li>
  `;
}

/**
 * Load a family: first what an episode was forked from, then forks, of those nearest to it first.
 * @param {string} eid
 */
function useFamily(eid) {
  const [members, setMembers] = useState(/** @type {Map<string, Member>} */ (new Map()));
  const [top, setTop] = useState({ root: eid, above: "" });
  const [failure, setFailure] = useState("");
  const [loading, setLoading] = useState(true);
  const acts = useRef({ up: () => {}, more: (/** @type {string} */ _) => {} });
  useEffect(() => {
    const leaving = new AbortController();
    /** @type {Map<string, Member>} */
    const known = new Map();
    let root = eid;
    const add = (/** @type {api.Episode} */ episode, /** @type {string[]} */ children) => {
      const before = known.get(episode.eid);
      const all = [...new Set([...(before?.children ?? []), ...children])];
      known.set(episode.eid, { episode, children: all, next: before?.next });
    };
    const climb = async () => {
      let above = "more";
      for (let count = 0; count < ANCESTORS && above === "more"; count += 1) {
        const origin = known.get(root)?.episode.origin;
        if (!origin) above = "";
        else {
          const parent = await api.listed(origin.eid, leaving.signal);
          if (parent === null) above = "gone";
          else {
            add(parent, [root]);
            root = parent.eid;
          }
        }
      }
      if (above === "more" && !known.get(root)?.episode.origin) above = "";
      setTop({ root, above });
      setMembers(new Map(known));
    };
    const forks = async (/** @type {string} */ parent) => {
      const member = /** @type {Member} */ (known.get(parent));
      const page = await api.episodes({ origin: parent, order: "asc", limit: CHILDREN, cursor: member.next ?? null }, leaving.signal);
      const found = page.episodes.map((child) => child.eid);
      for (const child of page.episodes) add(child, []);
      const after = /** @type {Member} */ (known.get(parent));
      known.set(parent, { ...after, children: [...new Set([...after.children, ...found])], next: page.next });
      setMembers(new Map(known));
      return found;
    };
    const guarded = (/** @type {() => Promise<unknown>} */ act) => {
      setLoading(true);
      setFailure("");
      act()
        .catch((error) => leaving.signal.aborted || setFailure(error.message))
        .finally(() => leaving.signal.aborted || setLoading(false));
    };
    acts.current = { up: () => guarded(climb), more: (parent) => guarded(() => forks(parent)) };
    setMembers(new Map());
    guarded(async () => {
      add(await api.summary(eid, leaving.signal), []);
      await climb();
      let queue = [eid, ...[...known.keys()].filter((one) => one !== eid)];
      for (let count = 0; count < ASKED && queue.length > 0; count += AT_ONCE) {
        const now = queue.splice(0, AT_ONCE);
        queue = [...queue, ...(await Promise.all(now.map(forks))).flat().filter((child) => known.get(child)?.next === undefined && !queue.includes(child))];
      }
    });
    return () => leaving.abort();
  }, [eid]);
  return { members, ...top, failure, loading, up: () => acts.current.up(), more: (/** @type {string} */ parent) => acts.current.more(parent) };
}
