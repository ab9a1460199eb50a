/** Text of terminals: colours and weights are kept, and every other escape sequence is shown as one mark. */

/**
 * @typedef {object} Run A part of a text that looks alike.
 * @property {string} text
 * @property {string} classes Names of classes, separated by spaces.
 * @property {string} [color] Colour of the text, where no class has it.
 * @property {string} [background]
 */

const ESCAPE = "\u001b";
const CSI = /\u001b\[([0-?]{0,64})[ -/]{0,8}([@-~])/y;
const SHORT = /\u001b[ -/]{0,4}[0-~]/y;
const STRING = /\u001b[\]PX^_]/y;

/**
 * Return the runs of a text.
 * @param {string} text
 * @returns {Run[]}
 */
export function runs(text) {
  /** @type {Run[]} */
  const found = [];
  let look = new Look();
  let at = 0;
  let unended = false;
  while (at < text.length) {
    const next = text.indexOf(ESCAPE, at);
    const end = next === -1 ? text.length : next;
    if (end > at) found.push(look.run(text.slice(at, end)));
    if (next === -1) break;
    CSI.lastIndex = SHORT.lastIndex = STRING.lastIndex = next;
    const csi = CSI.exec(text);
    if (csi !== null) {
      if (csi[2] === "m") look = look.after(csi[1]);
      else found.push({ text: "\u241b", classes: "escape" });
      at = CSI.lastIndex;
    } else if (!unended && STRING.test(text)) {
      // A title, a link or another string for the terminal: to its end. One search tells whether there is any.
      const closing = endOf(text, next + 2);
      unended = closing === -1;
      found.push({ text: "\u241b", classes: "escape" });
      at = unended ? next + 2 : closing;
    } else {
      found.push({ text: "\u241b", classes: "escape" });
      at = SHORT.test(text) ? SHORT.lastIndex : next + 1;
    }
  }
  return found;
}

/**
 * Return where a string for the terminal has ended, or -1.
 * @param {string} text
 * @param {number} from
 */
function endOf(text, from) {
  const bell = text.indexOf("\u0007", from);
  const closing = text.indexOf("\u001b\\", from);
  if (bell !== -1 && (closing === -1 || bell < closing)) return bell + 1;
  return closing === -1 ? -1 : closing + 2;
}

const NAMES = new Map([
  [1, "bold"], [2, "dim"], [3, "italic"], [4, "underline"], [7, "inverse"], [9, "struck"],
]);
/** What a number ends. */
const ENDS = new Map([
  [22, ["bold", "dim"]], [23, ["italic"]], [24, ["underline"]], [27, ["inverse"]], [29, ["struck"]],
]);

/** How text looks after the sequences before it. */
class Look {
  /**
   * @param {Set<string>} names
   * @param {string | null} front Class or colour of the text.
   * @param {string | null} back Class or colour behind it.
   */
  constructor(names = new Set(), front = null, back = null) {
    this.names = names;
    this.front = front;
    this.back = back;
  }

  /**
   * Return a text that looks so.
   * @param {string} text
   * @returns {Run}
   */
  run(text) {
    const classes = [...this.names];
    /** @type {Run} */
    const run = { text, classes: "" };
    if (this.back !== null && !this.back.startsWith("rgb")) classes.push(this.back); // whose class has a text colour, too
    else if (this.back !== null) [run.color, run.background] = [against(this.back), this.back];
    else if (this.front !== null && !this.front.startsWith("rgb")) classes.push(this.front);
    else if (this.front !== null) [run.color, run.background] = [this.front, against(this.front)];
    run.classes = classes.join(" ");
    return run;
  }

  /**
   * Return how text looks after a sequence.
   * @param {string} parameters Numbers with semicolons or colons between them.
   */
  after(parameters) {
    let { front, back } = this;
    let names = new Set(this.names);
    const numbers = parameters.split(/[;:]/).map((part) => (part === "" ? 0 : Number(part)));
    for (let at = 0; at < numbers.length; at += 1) {
      const code = numbers[at];
      const name = NAMES.get(code);
      if (code === 0) [names, front, back] = [new Set(), null, null];
      else if (name !== undefined) names.add(name);
      else if (ENDS.has(code)) for (const ended of ENDS.get(code) ?? []) names.delete(ended);
      else if (code === 39) front = null;
      else if (code === 49) back = null;
      else if (code === 38 || code === 48) {
        const [color, taken] = extended(numbers.slice(at + 1));
        at += taken;
        if (code === 38) front = color;
        else back = color;
      } else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) front = `front-${code % 10}${code > 89 ? "b" : ""}`;
      else if ((code >= 40 && code <= 47) || (code >= 100 && code <= 107)) back = `back-${code % 10}${code > 99 ? "b" : ""}`;
    }
    return new Look(names, front, back);
  }
}

/**
 * Return black or white, whichever is legible beside a colour: output may neither hide text nor be hard to read.
 * @param {string} color "rgb(R G B)".
 */
function against(color) {
  const [red, green, blue] = (color.match(/\d+/g) ?? []).map((part) => {
    const level = Number(part) / 255;
    return level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4;
  });
  // Relative luminance of WCAG 2; at 0.179 both have the same contrast, 4.6.
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "rgb(0 0 0)" : "rgb(255 255 255)";
}

/**
 * Return a colour of 256 or of all, and how many numbers it took.
 * @param {number[]} numbers Those behind 38 or 48.
 * @returns {[string | null, number]}
 */
function extended(numbers) {
  if (numbers[0] === 2) {
    const parts = numbers.slice(1, 4);
    const known = parts.length === 3 && parts.every((part) => part >= 0 && part <= 255);
    return [known ? `rgb(${parts.join(" ")})` : null, 4];
  }
  if (numbers[0] !== 5) return [null, 0];
  const code = numbers[1] ?? 0;
  if (!(code >= 16 && code <= 255)) return [null, 2];
  if (code >= 232) return [`rgb(${Array(3).fill(8 + 10 * (code - 232)).join(" ")})`, 2];
  const levels = [Math.floor((code - 16) / 36), Math.floor((code - 16) / 6) % 6, (code - 16) % 6];
  return [`rgb(${levels.map((level) => (level === 0 ? 0 : 55 + 40 * level)).join(" ")})`, 2];
}
