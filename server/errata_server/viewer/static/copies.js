/** Commands that read, outside of the browser, what a screen shows. */

import { SERVER, stateAddress } from "./api.js";
import { html, useState } from "./html.js";

/**
 * Buttons that copy how state(t) is read.
 * @param {{eid: string, t: number}} properties
 */
export function StateCopies({ eid, t }) {
  const server = SERVER.replace(/\/$/, "");
  const texts = {
    curl: `curl ${quoted(stateAddress(eid, t))}`,
    Python: `from errata_client import Episodes\n\nstate = await Episodes(${JSON.stringify(server)}).state_at(${t}, eid=${JSON.stringify(eid)})`,
    CLI: `errata replay ${eid} ${t} --url ${quoted(server)}`,
  };
  return html`<span class="copies">copy as ${Object.entries(texts).map(([name, text]) => html`<${Copy} name=${name} text=${text} />`)}</span>`;
}

/** @param {{name: string, text: string}} properties */
export function Copy({ name, text }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button title=${text} onClick=${copy}>${copied ? "copied" : name}</button>`;
}

/** @param {string} text */
export function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
