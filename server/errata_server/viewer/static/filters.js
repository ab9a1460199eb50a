/** What a list is filtered by: a form whose fields stand in the address, with the words that are in use. */

import { html, useEffect, useMemo, useState } from "./html.js";
import { offers } from "./offers.js";
import { STATUSES, meaning } from "./status.js";
import { named } from "./text.js";

/** Fields of the form, in its order: name, label, type of input, and what stands in it while it is empty. */
const FIELDS = [
  ["text", "search", "search", "in task, eid, alias"],
  ["environment", "environment", "text", ""],
  ["task", "task", "text", ""],
  ["status", "status", "select", ""],
  ["error_kind", "error", "text", ""],
  ["reward_min", "reward from", "number", ""],
  ["reward_max", "to", "number", ""],
  ["run", "run", "text", ""],
  ["step", "step", "number", ""],
  ["group", "group", "text", ""],
];

/** Names of the filters, as parameters of the address and of the server. */
export const FILTERS = FIELDS.map(([name]) => name);

/** Filters that are whole words, and are chosen from those in use. */
const WHOLE = ["environment", "task", "error_kind", "run", "group"];

/** Most words that are offered for a field. */
const WORDS = 200;

/** @typedef {Record<string, string | null>} Query */

/** @param {Query} query */
function isFiltered(query) {
  return FILTERS.some((name) => query[name]);
}

/**
 * Show a list with other filters.
 * @param {URLSearchParams} parameters
 */
function go(parameters) {
  history.pushState(null, "", `?${parameters}`);
  dispatchEvent(new PopStateEvent("popstate"));
}

/**
 * @param {{query: Query, search: string, listed: import("./api.js").Episode[]}} properties ``listed``: episodes whose words
 *   are offered.
 */
export function Filters({ query, search, listed }) {
  const form = useMemo(() => html`<${Form} query=${query} />`, [search]); // what is being typed stays when rows change
  return html`${form}<${Words} listed=${listed} />`;
}

/** @param {{query: Query}} properties */
function Form({ query }) {
  const take = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const given = new URLSearchParams();
    for (const [name, value] of new FormData(/** @type {HTMLFormElement} */ (event.currentTarget))) if (value !== "") given.set(name, String(value));
    go(given);
  };
  return html`
    <form class="filters" role="search" onSubmit=${take}>
      ${FIELDS.map(([name, label, type, empty]) => html`<label>${label} ${type === "select" ? html`<${Choice} name=${name} value=${query[name] ?? ""} />` : html`<input name=${name} type=${type} step=${name === "step" ? "1" : "any"}
        placeholder=${empty} list=${WHOLE.includes(name) ? `words-${name}` : undefined} value=${query[name] ?? ""} />`}</label>`)}
      ${["sort", "order"].map((name) => query[name] && html`<input type="hidden" name=${name} value=${query[name]} />`)}
      <button>filter</button> ${isFiltered(query) && html`<a href="?">clear filters</a>`}
    </form>
  `;
}

/** @param {{name: string, value: string}} properties */
function Choice({ name, value }) {
  return html`<select name=${name}>${["", ...STATUSES].map((one) => html`<option value=${one} title=${meaning(one)} selected=${one === value}>${one}</option>`)}</select>`;
}

/**
 * Words for fields; one with hidden characters is not offered, because a browser would show it as it is.
 * @param {{listed: import("./api.js").Episode[]}} properties
 */
function Words({ listed }) {
  const [served, setServed] = useState(/** @type {string[]} */ ([]));
  useEffect(() => {
    offers().then(({ offered }) => setServed(offered.map(({ environment }) => environment)), () => setServed([])); // the list itself says what is wrong
  }, []);
  /** @type {Record<string, (string | null)[]>} */
  const words = {
    environment: [...served, ...listed.map(({ environment }) => environment)],
    task: listed.map(({ task }) => task),
    error_kind: listed.flatMap(({ error_kinds }) => Object.keys(error_kinds)),
    run: listed.map(({ run }) => run),
    group: listed.map(({ group }) => group),
  };
  return WHOLE.map((name) => html`<datalist id=${`words-${name}`}>${[...new Set(words[name])].filter((word) => word && named(word) === word).sort().slice(0, WORDS).map((word) => html`<option value=${word} />`)}</datalist>`);
}

/**
 * Says that nothing is listed, and what may be the reason.
 * @param {{query: Query}} properties
 */
export function Nothing({ query }) {
  const whole = FIELDS.filter(([name]) => WHOLE.includes(name) && query[name]).map(([, label]) => label);
  const searched = query.text ? ["search looks in task, eid and alias"] : [];
  const compared = whole.length > 0 ? [`${whole.join(", ")} must be a whole name, one of those that the field offers`] : [];
  return html`<p class="none">${isFiltered(query) ? "no episodes with these filters" : "no episodes"}${
    [...searched, ...compared].map((why) => `; ${why}`)}</p>`;
}
