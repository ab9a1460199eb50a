/** Looks for a text in the actions of an episode's turns, of which more may still be coming. */

import { html, useEffect, useRef, useState } from "./html.js";

/** Turns that are looked at before the page is drawn and keys are read again. */
const SLICE = 500;

/** @typedef {{text: string, seek: (step: 1 | -1) => void}} Search ``text``: what is looked for, "" where nothing is. */

/**
 * Return what holds the texts of an action, in lower case.
 * @param {any} action
 * @returns {string}
 */
function textsOf(action) {
  if (action === null || action === undefined) return "";
  return (typeof action === "object" ? Object.values(action).map(textsOf).join("\n") : String(action)).toLowerCase();
}

/**
 * Look for a text.
 * @param {import("./api.js").Turn[]} turns Those that are there.
 * @param {number} total How many the episode has.
 * @param {boolean} complete Whether all are there.
 * @param {number} chosen Index of the turn from which it is looked for.
 * @param {(index: number) => void} choose Called with the index of a turn that has it.
 */
export function useSearch(turns, total, complete, chosen, choose) {
  const [text, setText] = useState("");
  const [said, setSaid] = useState("");
  const [hunt, setHunt] = useState(/** @type {{text: string, next: number, from: number, step: 1 | -1, wrapped: boolean} | null} */ (null));
  const fresh = useRef(true);
  const now = useRef({ total, choose });
  now.current = { total, choose };
  useEffect(() => {
    if (hunt === null) return undefined;
    let left = false;
    (async () => {
      const found = (/** @type {number} */ index) => {
        setSaid(`turn ${turns[index].t} has it`);
        setHunt(null);
        now.current.choose(index);
      };
      for (let looked = 1; !left; looked += 1) {
        if (hunt.next < 0 || hunt.next >= turns.length) {
          if (!complete) return setSaid(`searching turn ${turns.length} of ${now.current.total}`); // goes on when more are there
          if (hunt.wrapped) break;
          hunt.wrapped = true;
          hunt.next = hunt.step === 1 ? 0 : turns.length - 1;
        }
        const { next } = hunt;
        if (turns[next] === undefined) break;
        if (textsOf(turns[next].action).includes(hunt.text)) return found(next);
        if (hunt.wrapped && next === hunt.from) break;
        hunt.next += hunt.step;
        if (looked % SLICE === 0) {
          setSaid(`searching turn ${next + 1} of ${now.current.total}`);
          await new Promise((resolve) => setTimeout(resolve));
        }
      }
      if (left) return undefined;
      setHunt(null);
      return setSaid("no action has it");
    })();
    return () => {
      left = true;
    };
  }, [hunt, turns, complete]);
  const type = (/** @type {string} */ typed) => {
    fresh.current = true;
    setText(typed);
    setSaid("");
    setHunt(null);
  };
  const seek = (/** @type {1 | -1} */ step) => {
    if (text === "") return;
    const first = fresh.current && step === 1 ? chosen : chosen + step; // a new text may stand in the turn that is looked at
    fresh.current = false;
    setSaid("");
    setHunt({ text: text.toLowerCase(), next: first, from: chosen, step, wrapped: false });
  };
  return { text, said, type, seek };
}

/**
 * The field, and what the search has come to.
 * @param {{search: ReturnType<typeof useSearch>}} properties
 */
export function SearchField({ search: { text, said, type, seek } }) {
  const submit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    seek(1);
    if (text !== "") document.getElementById("timeline")?.focus(); // where n and p go on
  };
  return html`
    <form class="search" role="search" onSubmit=${submit}>
      <label>find in actions <input id="search" type="search" value=${text} onInput=${(/** @type {any} */ event) => type(event.currentTarget.value)} /></label>
      <span role="status">${said}</span>
    </form>
  `;
}
