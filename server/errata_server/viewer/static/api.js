/** Reads the episodes of the server that this page comes from. */

/** Address of the server, or of the environment below whose name the viewer is, with a slash at its end. */
export const SERVER = new URL("..", import.meta.url).href;

/**
 * @typedef {object} Episode What lists say of an episode (PROTOCOL G).
 * @property {string} eid
 * @property {string | null} episode_id
 * @property {string} environment
 * @property {string} session
 * @property {number} created Seconds since 1970.
 * @property {number | null} last Time of its newest delivery, seconds since 1970.
 * @property {string | null} task
 * @property {string | null} status
 * @property {boolean} done
 * @property {number} deliveries
 * @property {number} reward
 * @property {Record<string, number>} error_kinds
 * @property {Record<string, number>} hint_keys
 * @property {{eid: string, t: number} | null} origin
 * @property {string | null} group
 * @property {number | null} step
 * @property {string | null} run
 */

/** @typedef {{episodes: Episode[], next: string | null}} EpisodePage */

/**
 * @typedef {object} Site Where a turn failed (PROTOCOL B3).
 * @property {string} [action_field]
 * @property {[number, number]} [action_span] Half open, in code points of the field.
 * @property {string} [file]
 * @property {number} [line]
 * @property {number} [column]
 * @property {string} [test_id]
 * @property {string} [message]
 */

/**
 * @typedef {object} Turn A turn as the timeline shows it.
 * @property {number} t
 * @property {string} kind
 * @property {any} action
 * @property {number | null} reward
 * @property {boolean} done
 * @property {string | null} error
 * @property {string | null} error_kind
 * @property {Site | null} error_site
 * @property {string | null} hint_template_key
 * @property {number | null} exit_code
 * @property {number | null} duration_s Time that the call took.
 * @property {number | null} since_s Time since the turn before began.
 * @property {number | null} created Seconds since 1970.
 * @property {boolean} action_cut Whether ``action`` is less than the whole.
 * @property {number} action_bytes
 * @property {string | null} tool
 * @property {string | null} severity
 * @property {number} late_rewards
 * @property {string} digest
 * @property {string} [semantic_digest]
 */

/** An answer of the server that is no success. */
export class Refused extends Error {
  /**
   * @param {number} status
   * @param {string} code
   * @param {string} message
   */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/**
 * Return the address of something on the server.
 * @param {string} path Path below the server's address.
 * @param {Record<string, string | number | null | undefined>} [parameters] Query; what is null or empty is left out.
 */
export function address(path, parameters = {}) {
  const url = new URL(path, SERVER);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, String(value));
  }
  return url.href;
}

/**
 * Ask the server.
 * @param {string} url
 * @param {AbortSignal} [signal]
 * @param {RequestInit} [more] Method, headers and body of what is no read.
 * @returns {Promise<Response>}
 */
export async function ask(url, signal, more = {}) {
  const response = await fetch(url, { signal, credentials: "same-origin", ...more });
  if (response.ok) return response;
  if (response.status === 401) dispatchEvent(new Event("loggedout"));
  const told = await response.json().catch(() => ({}));
  throw new Refused(response.status, told.code ?? "", told.message ?? `the server answered ${response.status}`);
}

/**
 * Return whether the server has tokens, and whether this browser has logged in where that is needed.
 * @returns {Promise<{tokens: boolean, signed_in: boolean}>}
 */
export async function entry() {
  return (await ask(address("viewer/login"))).json();
}

/** @param {string} token */
export async function login(token) {
  if (!/^[!-~]+$/.test(token)) throw new Error("a token has no spaces, and no characters beyond ASCII");
  await (await ask(address("viewer/login"), undefined, { method: "POST", headers: { Authorization: `Bearer ${token}` } })).json();
}

/** End the login of this browser. */
export async function logout() {
  await (await ask(address("viewer/logout"), undefined, { method: "POST" })).json();
}

/**
 * Return a page of episodes.
 * @param {Record<string, string | number | null>} query
 * @param {AbortSignal} [signal]
 * @returns {Promise<EpisodePage>}
 */
export async function episodes(query, signal) {
  return (await ask(address("episodes", query), signal)).json();
}

/**
 * Return what episodes add up to over time.
 * @param {Record<string, string | number | null>} query
 * @param {AbortSignal} [signal]
 * @returns {Promise<{bucket_s: number, buckets: any[]}>}
 */
export async function aggregates(query, signal) {
  return (await ask(address("episodes/aggregates", query), signal)).json();
}

/**
 * Return what lists say of one episode.
 * @param {string} eid
 * @param {AbortSignal} [signal]
 * @returns {Promise<Episode>}
 */
export async function episode(eid, signal) {
  return (await ask(address(`episodes/${encodeURIComponent(eid)}`), signal)).json();
}

/**
 * Return what lists say of one episode, without reading its turns; null where they do not have it.
 * @param {string} eid
 * @param {AbortSignal} [signal]
 * @returns {Promise<Episode | null>}
 */
export async function listed(eid, signal) {
  const named = await episodes({ text: eid, limit: 20 }, signal);
  return named.episodes.find((one) => one.eid === eid) ?? null;
}

/**
 * Return what lists say of one episode.
 * @param {string} eid
 * @param {AbortSignal} [signal]
 * @returns {Promise<Episode>}
 */
export async function summary(eid, signal) {
  return (await listed(eid, signal)) ?? episode(eid, signal);
}

/** @typedef {{session_id: string, eid: string, t: number, origin: {eid: string, t: number}, read_key?: string}} Fork An answer (PROTOCOL A5). */

/** @param {string} eid */
export function forkAddress(eid) {
  return address(`episodes/${encodeURIComponent(eid)}/fork`);
}

/**
 * Return the request that forks an episode. The fork has no labels: it is no rollout of the training run.
 * @param {number} t
 * @param {string} request_id Asked again with the same one, the same fork is the answer.
 */
export function forking(t, request_id) {
  return { t, request_id, labels: {} };
}

/**
 * Fork an episode.
 * @param {string} eid
 * @param {number} t
 * @param {string} request_id
 * @returns {Promise<Fork>}
 */
export async function fork(eid, t, request_id) {
  return (await ask(forkAddress(eid), undefined, { method: "POST", body: JSON.stringify(forking(t, request_id)), headers: { "Content-Type": "application/json" } })).json();
}

/**
 * Return the request that ends a session (PROTOCOL A3).
 * @param {string} session_id
 */
export function ending(session_id) {
  return { jsonrpc: "2.0", id: 1, method: "openenv/session/close", params: { session_id } };
}

/**
 * End a session.
 * @param {string} server Address at which it is played, without a slash at its end.
 * @param {string} session_id
 * @returns {Promise<boolean>} Whether it has ended; else it ends with the socket that it has.
 */
export async function endSession(server, session_id) {
  const more = { method: "POST", body: JSON.stringify(ending(session_id)), headers: { "Content-Type": "application/json" } };
  const { error, result } = await (await ask(`${server}/mcp`, undefined, more)).json();
  if (error) throw new Refused(200, error.data?.code ?? "", error.message);
  return result?.closed === true;
}

/**
 * Return the rewards that came after their step.
 * @param {string} eid
 * @param {AbortSignal} [signal]
 * @returns {Promise<{t: number, value: number}[]>}
 */
export async function rewards(eid, signal) {
  return (await ask(address(`episodes/${encodeURIComponent(eid)}/rewards`), signal)).json();
}

/**
 * Return one turn.
 * @param {string} eid
 * @param {number} t
 * @param {AbortSignal} [signal]
 * @returns {Promise<Turn>}
 */
export async function turn(eid, t, signal) {
  const page = await (await ask(turnsAddress(eid, 1, t === 0 ? null : String(t - 1)), signal)).json();
  if (page.turns[0]?.t !== t) throw new Error(`${eid} has no turn ${t} any more`);
  return page.turns[0];
}

/**
 * Yield the turns of an episode, a page at a time.
 * @param {string} eid
 * @param {string | null} cursor Where an earlier reader ended; null is the beginning.
 * @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<{turns: Turn[], cursor: string | null}>}
 */
export async function* turns(eid, cursor, signal) {
  for (;;) {
    const page = await (await ask(turnsAddress(eid, 500, cursor), signal)).json();
    cursor = page.next;
    yield { turns: page.turns, cursor };
    if (cursor === null) return;
  }
}

/**
 * Return the address of a page of turns.
 * @param {string} eid
 * @param {number} limit Most turns.
 * @param {string | null} cursor The t that it begins behind.
 */
export function turnsAddress(eid, limit, cursor) {
  return address(`episodes/${encodeURIComponent(eid)}/turns`, { limit, cursor });
}

/**
 * Return state(t): the bytes that the agent was sent, and the digest that the server gives them.
 * @param {string} eid
 * @param {number} t
 * @param {AbortSignal} [signal]
 */
export async function state(eid, t, signal) {
  const response = await ask(stateAddress(eid, t), signal);
  const bytes = new Uint8Array(await response.arrayBuffer());
  return { bytes, digest: (response.headers.get("ETag") ?? "").replaceAll('"', "") };
}

/**
 * Return what the agent read of state(t).
 * @param {string} eid
 * @param {number} t
 * @param {AbortSignal} [signal]
 * @returns {Promise<{agent_text: string, agent_text_version: string | null, as_read: boolean}>}
 */
export async function agentText(eid, t, signal) {
  return (await ask(`${stateAddress(eid, t)}/agent_text`, signal)).json();
}

/**
 * Return the whole action that state(t) answered, as text.
 * @param {string} eid
 * @param {number} t
 * @param {AbortSignal} [signal]
 */
export async function action(eid, t, signal) {
  return (await ask(`${stateAddress(eid, t)}/action`, signal)).text();
}

/**
 * Return the address of state(t).
 * @param {string} eid
 * @param {number} t
 */
export function stateAddress(eid, t) {
  return address(`episodes/${encodeURIComponent(eid)}/states/${t}`);
}
