/** One turn: what the agent did, what was wrong with it, and what it read. */

import { Action } from "./action.js";
import { action, agentText, state } from "./api.js";
import { StateCopies } from "./copies.js";
import { checked } from "./digest.js";
import { html, useEffect, useState } from "./html.js";
import { Output, Plain, Trouble } from "./output.js";
import { duration, isSaid, number } from "./text.js";

/** Ways to look at a state. */
export const VIEWS = ["agent text", "fields", "raw"];

/** @typedef {(view: string) => void} Choose */

/**
 * @param {{eid: string, turn: import("./api.js").Turn, view: string, setView: Choose, setUsual: Choose}} properties
 */
export function TurnDetail({ eid, turn, view, setView, setUsual }) {
  return html`
    <article class="turn" aria-label=${`Turn ${turn.t}`}>
      <h2>t=${turn.t} <small>${turn.kind}${turn.done ? ", the last" : ""}</small></h2>
      ${turn.kind === "fork" && html`<p class="none">the fork began with what its parent had read there; an error here is the parent's</p>`}
      <${Marker} turn=${turn} />
      <h3>Action</h3>
      <${Sent} key=${turn.t} eid=${eid} turn=${turn} />
      <${State} eid=${eid} turn=${turn} view=${view} setView=${setView} setUsual=${setUsual} />
    </article>
  `;
}

/**
 * The action of a turn; of a long one first its beginning. One that was wrong is shown whole, because its error's span
 * counts in the whole.
 * @param {{eid: string, turn: import("./api.js").Turn}} properties
 */
function Sent({ eid, turn }) {
  const [whole, setWhole] = useState(/** @type {any} */ (undefined));
  const [failure, setFailure] = useState("");
  const [wanted, setWanted] = useState(turn.error_site?.action_span !== undefined);
  useEffect(() => {
    if (!turn.action_cut || !wanted) return undefined;
    const leaving = new AbortController();
    setFailure("");
    action(eid, turn.t, leaving.signal)
      .then((text) => setWhole(parsed(text)))
      .catch((error) => {
        if (leaving.signal.aborted) return;
        setFailure(error.message);
        setWanted(false); // the button asks again
      });
    return () => leaving.abort();
  }, [eid, turn.t, wanted]);
  const shown = whole === undefined ? turn.action : whole;
  return html`<${Action} action=${shown} site=${turn.action_cut && whole === undefined ? null : turn.error_site} />
    ${failure && html`<${Trouble} text=${`only the beginning of the action: ${failure}`} />`}
    ${turn.action_cut && whole === undefined && html`<button onClick=${() => setWanted(true)}>all ${turn.action_bytes} bytes</button>`}`;
}

/** @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** @param {{turn: import("./api.js").Turn}} properties */
function Marker({ turn }) {
  const site = turn.error_site ?? {};
  const place = site.file === undefined || site.file === null ? "" : `${site.file}${site.line ? `:${site.line}` : ""}${site.column ? `:${site.column}` : ""}`;
  const facts = [
    [turn.severity ?? "error", turn.error_kind],
    ["tool", turn.tool],
    ["where", place],
    ["test", site.test_id],
    ["message", site.message],
    ["hint key", turn.hint_template_key],
    ["exit code", turn.exit_code === null || turn.exit_code === undefined ? "" : String(turn.exit_code)],
    ["reward", number(turn.reward)],
    ["took", duration(turn.duration_s)],
    ["after the turn before began", duration(turn.since_s)],
    ["late rewards", turn.late_rewards ? String(turn.late_rewards) : ""],
    ["failure", turn.error],
  ];
  return html`<dl class=${`facts ${turn.error_kind === null ? "" : "failed"}`}>${facts
    .filter(([, value]) => value)
    .map(([name, value]) => html`<div><dt>${name}</dt><dd><${Plain} text=${value} /></dd></div>`)}</dl>`;
}

/**
 * State(t): loaded when the turn is looked at, and its digest checked. `setUsual` is told how it is shown as long as nobody
 * chose: as the agent read it, where that is known.
 * @param {{eid: string, turn: import("./api.js").Turn, view: string, setView: Choose, setUsual: Choose}} properties
 */
function State({ eid, turn, view, setView, setUsual }) {
  const [found, setFound] = useState(/** @type {{t: number, text: string, read: string, note: string, check: string} | null} */ (null));
  const [failure, setFailure] = useState("");
  useEffect(() => {
    const leaving = new AbortController();
    setFailure("");
    (async () => {
      const [{ bytes }, said] = await Promise.all([state(eid, turn.t, leaving.signal), agentText(eid, turn.t, leaving.signal)]);
      const check = await checked(bytes, turn.digest);
      const note = said.as_read ? "" : "the environment that made the agent's text is not here: this is the observation as JSON";
      if (leaving.signal.aborted) return;
      setUsual(said.as_read ? "agent text" : "fields");
      setFound({ t: turn.t, text: new TextDecoder().decode(bytes), read: said.agent_text, note, check });
    })().catch((error) => leaving.signal.aborted || setFailure(error.message));
    return () => leaving.abort();
  }, [eid, turn.t]);
  if (failure) return html`<${Trouble} text=${failure} />`;
  if (found === null || found.t !== turn.t) return html`<p class="none">loading state(${turn.t})</p>`;
  return html`
    <h3>
      State
      <span class="switch" role="group" aria-label="How the state is shown">
        ${VIEWS.map((name) => html`<button aria-pressed=${name === view} onClick=${() => setView(name)}>${name}</button>`)}
      </span>
    </h3>
    ${view === "raw" && html`<${Output} key=${turn.t} text=${found.text} label="State, raw" />`}
    ${view === "fields" && html`<${Fields} key=${turn.t} text=${found.text} />`}
    ${view === "agent text" && html`<${Output} key=${turn.t} text=${found.read} label="What the agent read" />${found.note && html`<p class="none">${found.note}</p>`}`}
    <p class=${`digest ${found.check}`}>
      <code>${turn.digest}</code> <span>${SAID.get(found.check)}</span> <${StateCopies} eid=${eid} t=${turn.t} />
    </p>
  `;
}

const SAID = new Map([
  ["same", "checked in this browser: raw has the bytes whose digest was recorded when they were sent"],
  ["other", "NOT the digest of the raw bytes"],
  ["unknown", "not checked: the browser does so on https and on this machine only"],
]);

/**
 * An observation, field by field; what is no JSON object, as it is.
 * @param {{text: string}} properties
 */
function Fields({ text }) {
  /** @type {any} */
  let payload;
  try {
    payload = JSON.parse(text);
  } catch {
    return html`<${Output} text=${text} label="State" />`;
  }
  const observation = payload?.observation ?? payload;
  if (observation === null || typeof observation !== "object" || Array.isArray(observation)) return html`<${Output} text=${text} label="State" />`;
  const fields = Object.entries(observation).sort(([one], [other]) => Number(one === "metadata") - Number(other === "metadata"));
  const shown = fields.filter(([name, value]) => !MARKERS.has(name) && isSaid(value));
  return html`<dl class="fields">${shown.map(
    ([name, value]) => html`<dt><${Plain} text=${name} /></dt><dd><${Output} text=${typeof value === "string" ? value : JSON.stringify(value, null, 1)} label=${name} /></dd>`,
  )}</dl><p class="none">without empty fields and those that are shown above; raw has all</p>`;
}

/** Fields of an observation that are shown as the turn's marker. */
const MARKERS = new Set(["error_kind", "error_site", "error_sites", "hint_template_key", "severity", "reward", "done"]);
