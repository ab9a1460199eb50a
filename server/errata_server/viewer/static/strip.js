/** The strip of an episode: a bar for each turn, by reward and error. It is the scroll bar of the timeline, too. */

import { html, useLayoutEffect, useRef, useState } from "./html.js";

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
    if (event.buttons !== 1 || canvas.current === null) return;
    const { left } = canvas.current.getBoundingClientRect();
    const index = Math.floor(((event.clientX - left) / width) * turns.length);
    choose(Math.max(0, Math.min(turns.length - 1, index)));
  };
  return html`<canvas class="strip" ref=${canvas} height=${HEIGHT} role="scrollbar" aria-controls="timeline" aria-orientation="horizontal"
    aria-label="Turns by reward and error" aria-valuemin="0" aria-valuemax=${Math.max(0, turns.length - 1)} aria-valuenow=${chosen}
    onPointerDown=${take} onPointerMove=${take} />`;
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
  const [plain, error, good, mark] = ["--line", "--error", "--good", "--chosen"].map(color);
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
  context.fillStyle = mark;
  context.fillRect(chosen * step, 0, Math.max(2, step), 2);
  context.fillRect(chosen * step, HEIGHT - 2, Math.max(2, step), 2);
}
