/** What the server that this page comes from offers, by environment. */

import { SERVER, address, ask } from "./api.js";

/** @typedef {{environment: string, extensions: Record<string, number>}} Offered */
/** @typedef {{several: boolean, offered: Offered[]}} Offers Whether each environment has an address of its own, below the server's. */

/** @type {Promise<Offers> | null} */
let asked = null;

/** Return what is offered; it is asked for once. */
export function offers() {
  asked ??= read().catch((error) => {
    asked = null;
    throw error;
  });
  return asked;
}

/** @returns {Promise<Offers>} */
async function read() {
  const answer = await (await ask(address("capabilities"))).json();
  const several = answer.environments !== undefined;
  return { several, offered: several ? Object.values(answer.environments) : [answer] };
}

/** Return whether sessions are played on this server: one that serves files only offers none. */
export async function isPlayed() {
  return (await offers()).offered.some((one) => one.extensions.mux !== undefined);
}

/**
 * Return the address at which the sessions of an environment are played, without a slash at its end; null where its
 * episodes cannot be forked here.
 * @param {string} environment
 */
export async function forksAt(environment) {
  const { several, offered } = await offers();
  const found = offered.find((one) => one.environment === environment && one.extensions.fork !== undefined);
  if (found === undefined) return null;
  return several ? `${SERVER}${encodeURIComponent(environment)}` : SERVER.replace(/\/$/, "");
}
