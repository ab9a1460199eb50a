/** The states of an episode, and what each means. */

import { html } from "./html.js";

/** @type {Map<string, string>} */
const MEANINGS = new Map([
  ["open", "its session is open, with a connection"],
  ["detached", "its session is open without a connection: its next request goes on with it"],
  ["done", "the environment said that it is done"],
  ["closed", "its session was closed before it was done"],
  ["lost", "its session cannot go on"],
  ["expired", "its session was idle for too long"],
]);

export const STATUSES = [...MEANINGS.keys()];

/**
 * Return what a status means.
 * @param {string} status
 */
export function meaning(status) {
  return MEANINGS.get(status);
}

/** @param {{status: string | null}} properties */
export function Status({ status }) {
  return html`<span title=${meaning(status ?? "")}>${status}</span>`;
}
