/** Shows what an agent did, with the part of it that was wrong. */

import { html } from "./html.js";
import { Output, Plain } from "./output.js";
import { cutAt, isSaid } from "./text.js";

/**
 * Return the object of an action whose field an error's site names: the action, or the arguments of a tool's call.
 * @param {any} action
 * @param {import("./api.js").Site | null} site
 */
function held(action, site) {
  const field = site?.action_field ?? "command";
  const span = site?.action_span;
  if (!span || action === null || typeof action !== "object") return null;
  for (const object of [action, action.arguments, action.params?.arguments]) {
    const text = object?.[field];
    if (typeof text === "string" && span[0] >= 0 && span[0] < span[1] && span[1] <= [...text].length) return { object, field, span };
  }
  return null;
}

/**
 * An action, field by field, without those that hold nothing.
 * @param {{action: any, site: import("./api.js").Site | null}} properties
 */
export function Action({ action, site }) {
  if (action === null || action === undefined) return html`<p class="none">nothing was sent</p>`;
  if (typeof action !== "object") return html`<${Output} text=${String(action)} label="Action" />`;
  const marked = held(action, site);
  const said = Object.entries(action).filter(([, value]) => isSaid(value));
  return html`<dl class="fields">${(said.length > 0 ? said : Object.entries(action)).map(([name, value]) => html`<${Field} name=${name} value=${value} of=${action} marked=${marked} />`)}</dl>`;
}

/** @param {{name: string, value: any, of: any, marked: ReturnType<typeof held>}} properties */
function Field({ name, value, of, marked }) {
  if (value !== null && typeof value === "object" && !Array.isArray(value) && marked !== null && marked.object !== of) {
    return html`<dt><${Plain} text=${name} /></dt><dd><dl class="fields">${Object.entries(value).map(([inner, held]) => html`<${Field} name=${inner} value=${held} of=${value} marked=${marked} />`)}</dl></dd>`;
  }
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
  if (marked !== null && marked.object === of && marked.field === name) {
    const [before, wrong, after] = cutAt(text, marked.span);
    return html`<dt><${Plain} text=${name} /></dt><dd><pre class="action"><${Plain} text=${before} /><mark><${Plain} text=${wrong} /></mark><${Plain} text=${after} /></pre></dd>`;
  }
  return html`<dt><${Plain} text=${name} /></dt><dd><${Output} text=${text} label=${name} /></dd>`;
}
