/** Forks an episode at a turn, and says how the fork is played. */

import * as api from "./api.js";
import { Copy, quoted } from "./copies.js";
import { html, useEffect, useState } from "./html.js";
import { forksAt } from "./offers.js";
import { Trouble } from "./output.js";

/** Longest action that stands in a command, bytes of its request. */
const LONGEST = 2000;

/** @typedef {api.Fork & {request_id: string, next: api.Turn | undefined}} Made ``next``: the parent's turn behind. */

/**
 * A button, where the server can fork the environment's episodes.
 * @param {{eid: string, environment: string, turn: api.Turn, next: api.Turn | undefined}} properties ``next``: the turn
 *   behind, whose action the commands repeat.
 */
export function ForkHere({ eid, environment, turn, next }) {
  const [server, setServer] = useState(/** @type {string | null} */ (null));
  const [child, setChild] = useState(/** @type {Made | null} */ (null));
  const [failure, setFailure] = useState("");
  const [asking, setAsking] = useState(false);
  const [wanted, setWanted] = useState(-1);
  useEffect(() => {
    forksAt(environment).then(setServer, () => setServer(null)); // the screen itself says that the server is away
  }, [environment]);
  if (server === null) return null;
  const fork = async () => {
    setWanted(-1);
    setAsking(true);
    setFailure("");
    const request_id = `viewer-${[...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    try {
      setChild({ ...(await api.fork(eid, turn.t, request_id)), request_id, next });
    } catch (error) {
      setFailure(/** @type {Error} */ (error).message);
    }
    setAsking(false);
  };
  return html`
    <div class="fork">
      ${wanted === turn.t
        ? html`<p>A new session that goes on from t=${turn.t}. It has no labels, so no sum of a group or run counts it. It keeps a place on the server until it is closed or nobody has asked it for long. <button onClick=${fork}>make the fork</button> <button onClick=${() => setWanted(-1)}>cancel</button></p>`
        : html`<button disabled=${asking} onClick=${() => setWanted(turn.t)}>fork here</button>`}
      ${failure && html`<${Trouble} text=${failure} />`}
      ${child && html`<${Commands} key=${child.eid} child=${child} server=${server} close=${() => setChild(null)} />`}
    </div>
  `;
}

/** @param {{child: Made, server: string, close: () => void}} properties */
function Commands({ child, server, close }) {
  const { next, origin: { eid, t } } = child;
  const commands = Object.entries({ Python: python(child, server, next), shell: shell(child, server, next), "curl, whose answer names this fork and its session once more": curl(child) });
  return html`
    <section class="made" aria-label="The fork">
      <p role="status">forked at t=${t}: <a class="eid" href=${`#${child.eid}`}>${child.eid}</a>, <a href=${`#forks/${eid}`}>its family</a>. These commands play it, with the parent's next action: put another one in its place. They hold the session id, which is shown here only, and whoever has it can play:</p>
      ${commands.map(([name, text]) => html`<h3>${name} <span class="copies"><${Copy} name="copy" text=${text} /></span></h3><pre tabindex="0" role="region" aria-label=${name} class="command">${text}</pre>`)}
      <${End} child=${child} server=${server} /> <button onClick=${close}>close</button>
    </section>
  `;
}

/**
 * Ends the fork's session. Where the server has tokens its login opens reads and forks only, so there is a command instead.
 * @param {{child: Made, server: string}} properties
 */
function End({ child, server }) {
  const [state, setState] = useState(/** @type {"" | "asking" | "ending" | "ended" | "ends"} */ (""));
  const [failure, setFailure] = useState("");
  if (!child.read_key) return html`<h3>curl, which ends this fork <span class="copies"><${Copy} name="copy" text=${curlEnd(child, server)} /></span></h3><pre tabindex="0" role="region" aria-label="end" class="command">${curlEnd(child, server)}</pre>`;
  const end = async () => {
    setState("ending");
    setFailure("");
    try {
      setState((await api.endSession(server, child.session_id)) ? "ended" : "ends");
    } catch (error) {
      setFailure(/** @type {Error} */ (error).message);
      setState("");
    }
  };
  return html`
    ${failure && html`<${Trouble} text=${failure} />`}
    ${state === "asking"
      ? html`<p class="ends">Its session ends and leaves its place; its episode stays. <button onClick=${end}>end it</button> <button onClick=${() => setState("")}>cancel</button></p>`
      : state === "ended" || state === "ends"
        ? html`<p role="status">${state === "ended" ? "the fork has ended" : "somebody is connected to the fork: it ends with that connection"}; its episode stays</p>`
        : html`<button disabled=${state === "ending"} onClick=${() => setState("asking")}>end this fork</button>`}
  `;
}

/** @param {api.Fork} child @param {string} server */
function curlEnd({ session_id }, server) {
  return `curl -sS -H "Authorization: Bearer $ERRATA_TOKEN" -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(api.ending(session_id)))} ${quoted(`${server}/mcp`)}`;
}

/**
 * @param {api.Fork} child
 * @param {string} server
 */
function client(child, server) {
  const token = child.read_key ? "" : ', headers={"Authorization": "Bearer " + os.environ["ERRATA_TOKEN"]}';
  return { token: token !== "", made: `ErrataClient(${literal(server)}, session_id=${literal(child.session_id)}${token}).sync()` };
}

/** @param {api.Turn | undefined} next */
function call(next) {
  const repeats = next?.kind === "step" && !next.action_cut && next.action_bytes <= LONGEST;
  return repeats ? `env.step(${literal(next.action)})` : "env.state()";
}

/** @param {api.Fork} child @param {string} server @param {api.Turn | undefined} next */
function python(child, server, next) {
  const { token, made } = client(child, server);
  return `${token ? "import os\n\n" : ""}from errata_client import ErrataClient

with ${made} as env:
    print(${call(next)})
`;
}

/** @param {api.Fork} child @param {string} server @param {api.Turn | undefined} next */
function shell(child, server, next) {
  const { token, made } = client(child, server);
  return `python -c ${quoted(`${token ? "import os; " : ""}from errata_client import ErrataClient; env = ${made}.connect(); print(${call(next)}); env.close()`)}`;
}

/** @param {Made} child */
function curl(child) {
  const { eid, t } = child.origin;
  const token = child.read_key ? "" : ' -H "Authorization: Bearer $ERRATA_TOKEN"';
  return `curl -sS${token} -d ${quoted(JSON.stringify(api.forking(t, child.request_id)))} ${quoted(api.forkAddress(eid))}`;
}

/**
 * Return a value of JSON as Python, in printable ASCII: an agent wrote it, and a terminal must not obey it.
 * @param {any} value
 * @returns {string}
 */
export function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, held]) => `${literal(name)}: ${literal(held)}`).join(", ")}}`;
  return JSON.stringify(value).replaceAll(/[^\x20-\x7e]/gu, (character) => {
    const code = /** @type {number} */ (character.codePointAt(0));
    return code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}
