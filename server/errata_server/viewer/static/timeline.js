/** The turns of an episode in a list, of which only those in view are in the document. */

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { Plain } from "./output.js";
import { duration, number, oneLine } from "./text.js";

const ROW = 30;
/** Rows that come and go together; at least so many are there beyond each end of the view. */
const BLOCK = 6;

/**
 * @param {{turns: import("./api.js").Turn[], chosen: number, choose: (index: number) => void}} properties
 */
export function Timeline({ turns, chosen, choose }) {
  const list = useRef(/** @type {HTMLDivElement | null} */ (null));
  const frame = useRef(0);
  const [view, setView] = useState(() => rows(0, 600));
  const measure = () => {
    const { scrollTop, clientHeight } = /** @type {HTMLDivElement} */ (list.current);
    const now = rows(scrollTop, clientHeight);
    // The same object is no change, so nothing is rendered while the view stays between the same blocks.
    setView((shown) => (shown.first === now.first && shown.last === now.last && shown.height === now.height ? shown : now));
  };
  const scrolled = () => {
    frame.current ||= requestAnimationFrame(() => {
      frame.current = 0;
      measure();
    });
  };
  useEffect(() => {
    const watch = new ResizeObserver(measure);
    watch.observe(/** @type {HTMLDivElement} */ (list.current));
    return () => {
      watch.disconnect();
      cancelAnimationFrame(frame.current);
    };
  }, []);
  useLayoutEffect(() => {
    const element = /** @type {HTMLDivElement} */ (list.current);
    const [top, bottom] = [chosen * ROW, (chosen + 1) * ROW];
    if (top < element.scrollTop) element.scrollTop = top;
    else if (bottom > element.scrollTop + element.clientHeight) element.scrollTop = bottom - element.clientHeight;
  }, [chosen, view.height]); // a list that gets smaller keeps the chosen turn in view
  const { first, last } = view;
  return html`
    <div id="timeline" class="timeline" ref=${list} onScroll=${scrolled} role="listbox" tabindex="0" aria-label="Turns" aria-activedescendant=${`turn-${chosen}`}>
      <div class="all" style=${{ height: `${turns.length * ROW}px` }} role="presentation">
        ${turns.slice(first, last).map((turn, index) => html`<${Row} key=${turn.t} turn=${turn} index=${first + index} of=${turns.length} chosen=${first + index === chosen} choose=${choose} />`)}
      </div>
    </div>
  `;
}

/**
 * Return which rows are in the document: whole blocks, one more than is seen at each end.
 * @param {number} top Where the view begins, pixels.
 * @param {number} height
 */
function rows(top, height) {
  const block = ROW * BLOCK;
  return { first: Math.max(0, Math.floor(top / block) - 1) * BLOCK, last: (Math.ceil((top + height) / block) + 1) * BLOCK, height };
}

/**
 * @param {{turn: import("./api.js").Turn, index: number, of: number, chosen: boolean, choose: (index: number) => void}} properties
 */
function Row({ turn, index, of, chosen, choose }) {
  // While the list scrolls most rows stay as they are; the same tree is not compared again.
  return useMemo(() => shown(turn, index, of, chosen, choose), [turn, index, of, chosen, choose]);
}

/**
 * @param {import("./api.js").Turn} turn
 * @param {number} index
 * @param {number} of
 * @param {boolean} chosen
 * @param {(index: number) => void} choose
 */
function shown(turn, index, of, chosen, choose) {
  const names = ["row", chosen && "chosen", turn.error_kind !== null && "failed"].filter(Boolean).join(" ");
  return html`
    <div id=${`turn-${index}`} class=${names} style=${{ top: `${index * ROW}px` }} role="option" aria-selected=${chosen} aria-setsize=${of} aria-posinset=${index + 1} onClick=${() => choose(index)}>
      <span class="t">${turn.t}</span>
      <span class="what">${turn.kind === "step" ? "" : html`<b>${turn.kind} </b>`}<${Plain} text=${oneLine(turn.action)} /></span>
      <span class="kind"><${Plain} text=${turn.error_kind ?? (turn.done ? "done" : "")} /></span>
      <span class="reward">${number(turn.reward)}</span>
      <span class="took">${duration(turn.duration_s)}</span>
    </div>
  `;
}
