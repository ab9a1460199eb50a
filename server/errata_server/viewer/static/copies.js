/** Commands that read, outside of the browser, what a screen shows. */

import { SERVER, stateAddress } from "./api.js";
import { html, useState } from "./html.js";

let tokens = false;

/**
 * Say whether commands need a token, which they take from ERRATA_TOKEN.
 * @param {boolean} needed
 */
export function setTokens(needed) {
  tokens = needed;
}

const server = SERVER.replace(/\/$/, "");

/**
 * Buttons that copy how state(t) is read.
 * @param {{eid: string, t: number}} properties
 */
export function StateCopies({ eid, t }) {
  const texts = { curl: curl(eid, t), Python: python(eid, t), CLI: cli(eid, t) };
  return html`<span class="copies">copy as ${Object.entries(texts).map(([name, text]) => html`<${Copy} name=${name} text=${text} />`)}</span>`;
}

/** @param {string} eid @param {number} t */
function curl(eid, t) {
  return `curl -sS ${tokens ? '-H "Authorization: Bearer $ERRATA_TOKEN" ' : ""}${quoted(stateAddress(eid, t))}`;
}

/** @param {string} eid @param {number} t */
function python(eid, t) {
  const headers = tokens ? `, headers={"Authorization": f"Bearer {os.environ['ERRATA_TOKEN']}"}` : "";
  return `import asyncio${tokens ? "\nimport os" : ""}
import sys

from errata_client import Episodes


async def main():
    async with Episodes(${JSON.stringify(server)}${headers}) as episodes:
        state = await episodes.state_at(${JSON.stringify(eid)}, ${t})
    sys.stdout.buffer.write(state.payload)


asyncio.run(main())
`;
}

/** @param {string} eid @param {number} t */
function cli(eid, t) {
  return `errata replay ${quoted(eid)} ${t} --url ${quoted(server)}`;
}

/** @param {{name: string, text: string}} properties */
export function Copy({ name, text }) {
  const [copied, setCopied] = useState(false);
  const [shown, setShown] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    } catch {
      setShown(!shown); // a page that is neither on https nor of this machine has no clipboard
    }
  };
  return html`<button title=${text} onClick=${copy}>${copied ? "copied" : name}</button>${shown && html`<pre tabindex="0" role="region" aria-label=${name}>${text}</pre>`}`;
}

/** @param {string} text */
export function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
