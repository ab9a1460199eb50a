/** The strip of an episode: a bar for each turn, by reward and error. It is the scroll bar of the timeline, too. */

import { html, useLayoutEffect, useRef, useState } from "./html.js";
import { named, number } from "./text.js";

const HEIGHT = 36;

/**
 * @param {{turns: import("./api.js").Turn[], chosen: number, choose: (index: number) => void}} properties
 */
export function Strip({ turns, chosen, choose }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = /** @type {HTMLCanvasElement} */ (canvas.current);
    const watch = new ResizeObserver(() => setWidth(element.clientWidth));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (canvas.current !== null && width > 0) draw(canvas.current, turns, chosen, width);
  }, [turns, chosen, width]);
  const take = (/** @type {PointerEvent} */ event) => {
    if (canvas.current === null) return;
    const { left } = canvas.current.getBoundingClientRect();
    const index = Math.max(0, Math.min(turns.length - 1, Math.floor(((event.clientX - left) / width) * turns.length)));
    canvas.current.title = turns[index] ? said(turns[index]) : "";
    if (event.buttons === 1) choose(index);
  };
  return html`<p class="legend none">a bar for each turn: reward above, <span class="failed">errors</span> below</p>
    <canvas class="strip" ref=${canvas} height=${HEIGHT} role="scrollbar" aria-controls="timeline" aria-orientation="horizontal"
    aria-label="Turns by reward and error" aria-valuemin="0" aria-valuemax=${Math.max(0, turns.length - 1)} aria-valuenow=${chosen}
    onPointerDown=${take} onPointerMove=${take} />`;
}

/** @param {import("./api.js").Turn} turn */
function said({ t, error_kind, reward }) {
  const facts = [`t=${t}`, error_kind === null ? "" : named(error_kind), reward === null ? "" : `reward ${number(reward)}`];
  return facts.filter(Boolean).join(", ");
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {import("./api.js").Turn[]} turns
 * @param {number} chosen
 * @param {number} width CSS pixels.
 */
function draw(canvas, turns, chosen, width) {
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = HEIGHT * scale;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  const color = (/** @type {string} */ name) => style.getPropertyValue(name);
  const [plain, error, good, mark, page] = ["--line", "--error", "--good", "--text", "--page"].map(color);
  const most = turns.reduce((found, turn) => Math.max(found, Math.abs(turn.reward ?? 0)), 0) || 1;
  const step = width / Math.max(1, turns.length);
  turns.forEach((turn, index) => {
    const left = index * step;
    const thick = Math.max(1, step - (step > 4 ? 1 : 0));
    context.fillStyle = turn.error_kind === null ? plain : error;
    context.fillRect(left, HEIGHT - 8, thick, 8);
    if (turn.reward) {
      const tall = Math.max(3, ((HEIGHT - 12) * Math.abs(turn.reward)) / most);
      context.fillStyle = turn.reward > 0 ? good : error;
      context.fillRect(left, HEIGHT - 10 - tall, thick, tall);
    }
  });
  // Two colours, so that the frame stands out on whatever is below it.
  for (const [color, inset] of [[page, 1.5], [mark, 0.5]]) {
    context.strokeStyle = String(color);
    context.strokeRect(chosen * step + Number(inset), Number(inset), Math.max(2, step - 2 * Number(inset)), HEIGHT - 2 * Number(inset));
  }
}
