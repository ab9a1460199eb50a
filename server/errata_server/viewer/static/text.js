/** Text of agents and environments: cut at code points, with everything visible that would act on a reader. */

/**
 * Return a text in three parts, cut at code points, as the server counts them: JavaScript's own indexes count the
 * two halves of an emoji.
 * @param {string} text
 * @param {[number, number]} span Half open.
 * @returns {[string, string, string]}
 */
export function cutAt(text, [start, end]) {
  let at = 0;
  let begin = text.length;
  let index = 0;
  while (at < end && index < text.length) {
    if (at === start) begin = index;
    index += /** @type {number} */ (text.codePointAt(index)) > 0xffff ? 2 : 1;
    at += 1;
  }
  if (at === start) begin = index;
  return [text.slice(0, begin), text.slice(begin, index), text.slice(index)];
}

/**
 * Characters that change how those around them are shown, or nothing: controls, bidi marks, invisible ones. A joiner
 * between two emoji, as in those of families, is none.
 */
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200c\u200e\u200f\u202a-\u202e\u2028\u2029\u2060-\u2069\ufeff\ud800-\udfff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|(?<!\p{Extended_Pictographic}[\ufe0f\u{1f3fb}-\u{1f3ff}]?)\u200d|\u200d(?!\p{Extended_Pictographic})/gu;

const PLAIN = /^[\n\t -~]+$/;

/**
 * Return a text in parts; those with ``name`` are single characters that must not act, named by their code.
 * @param {string} text
 * @returns {{text: string, name?: string}[]}
 */
export function visible(text) {
  if (PLAIN.test(text)) return [{ text }]; // nearly all are, and the search below takes its time
  /** @type {{text: string, name?: string}[]} */
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > end) parts.push({ text: text.slice(end, found.index) });
    parts.push({ text: "", name: nameOf(found[0]) });
    end = found.index + found[0].length;
  }
  if (end < text.length) parts.push({ text: text.slice(end) });
  return parts;
}

/**
 * Return a text with its hidden characters by name, for a title or a label.
 * @param {string} text
 */
export function named(text) {
  return visible(text).map((part) => part.name ?? part.text).join("");
}

/** @param {string} character */
function nameOf(character) {
  const code = /** @type {number} */ (character.codePointAt(0));
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/**
 * Return a span of time as people say it.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/**
 * Return a reward, or a sum of them, as a short text.
 * @param {number | null | undefined} value
 * @param {number} digits Significant digits.
 */
export function number(value, digits = 6) {
  return value === null || value === undefined ? "" : String(Number(value.toPrecision(digits)));
}

/** Fields of an action that say nothing of what the agent did. */
const UNSAID = new Set(["metadata", "timeout_s", "type"]);

/**
 * Return whether a field of an action holds something.
 * @param {any} value
 */
export function isSaid(value) {
  return value !== null && value !== "" && !(typeof value === "object" && Object.keys(value).length === 0);
}

/**
 * Return an action in one line, as `errata replay` prints it.
 * @param {any} action
 */
export function oneLine(action) {
  return clipped(textOf(action));
}

/** @param {any} action */
function textOf(action) {
  if (typeof action === "string") return action;
  if (action === null || action === undefined) return "";
  if (typeof action !== "object" || Array.isArray(action)) return compact(action);
  if (typeof action.params?.name === "string") return `${action.params.name} ${compact(action.params.arguments ?? {})}`;
  if (typeof action.tool_name === "string") return `${action.tool_name} ${compact(action.arguments ?? {})}`;
  const { tool, ...said } = Object.fromEntries(Object.entries(action).filter(([name, value]) => !UNSAID.has(name) && isSaid(value)));
  const values = Object.values(said);
  if ((tool === undefined || tool === "run") && values.length === 1 && typeof values[0] === "string") return values[0];
  if (typeof tool !== "string") return compact(said);
  return values.every((value) => typeof value === "string") ? [tool, ...values.map(summarised)].join(" ") : `${tool} ${compact(said)}`;
}

/**
 * Return an argument of a tool: a file or a patch of several lines as the number of lines.
 * @param {any} text
 */
function summarised(text) {
  const lines = text.split("\n").length - 1;
  return lines <= 1 ? text : `(${lines} lines)`;
}

/**
 * Return a value of JSON in one line.
 * @param {any} value
 * @returns {string}
 */
function compact(value) {
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(compact).join(", ")}]`;
  return `{${Object.entries(value).map(([name, held]) => `${JSON.stringify(name)}: ${compact(held)}`).join(", ")}}`;
}

/** @param {string} text */
function clipped(text) {
  return text.slice(0, 400).replaceAll(/\s+/g, " ");
}
