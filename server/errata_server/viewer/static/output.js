/** Shows a text of an agent or an environment, however long it is and whatever is in it. */

import { runs } from "./ansi.js";
import { html, useMemo, useState } from "./html.js";
import { named, visible } from "./text.js";

const FIRST_LINES = 200;
const FIRST_COLUMNS = 2000;
const MORE_LINES = 2000;
const MORE_COLUMNS = 50_000;

/**
 * A text with the colours of a terminal. Its first lines are shown, and more of it on demand.
 * @param {{text: string, label: string}} properties
 */
export function Output({ text, label }) {
  const [lines, setLines] = useState(FIRST_LINES);
  const all = useMemo(() => text.replaceAll("\r\n", "\n").split("\n"), [text]);
  const left = all.length - lines;
  return html`
    <div class="output">
      <pre tabindex="0" role="region" aria-label=${named(label)}>${all.slice(0, lines).map((line) => html`<${Line} line=${line} />`)}</pre>
      ${left > 0 && html`<button onClick=${() => setLines(lines + MORE_LINES)}>${Math.min(left, MORE_LINES)} more of ${left} lines</button>`}
    </div>
  `;
}

/** @param {{line: string}} properties */
function Line({ line }) {
  const [columns, setColumns] = useState(FIRST_COLUMNS);
  const left = line.length - columns;
  return html`<span class="line">${runs(line.slice(0, columns)).map((run) => html`<${Shown} ...${run} />`)}${
    left > 0 && html` <button onClick=${() => setColumns(columns + MORE_COLUMNS)}>${Math.min(left, MORE_COLUMNS)} more of ${left} characters</button>`
  }${"\n"}</span>`;
}

/** @param {import("./ansi.js").Run} run */
function Shown({ text, classes, color, background }) {
  return html`<span class=${classes || undefined} style=${color || background ? { color, background } : undefined}><${Plain} text=${text} /></span>`;
}

/**
 * A text whose invisible characters are shown by name.
 * @param {{text: string}} properties
 */
export function Plain({ text }) {
  return visible(text).map((part) => (part.name === undefined ? part.text : html`<span class="named">${part.name}</span>`));
}

/**
 * What went wrong, in words of the server, which may repeat those of an agent.
 * @param {{text: string}} properties
 */
export function Trouble({ text }) {
  return html`<p class="trouble" role="alert"><${Plain} text=${text} /></p>`;
}
