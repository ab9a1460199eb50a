/** The kinds of an episode's errors, in one line. */

import { html } from "./html.js";
import { Plain } from "./output.js";

/** @param {{episode: import("./api.js").Episode}} properties */
export function Kinds({ episode }) {
  const kinds = Object.entries(episode.error_kinds).map(([kind, count]) => `${kind} ${count}`);
  return kinds.length > 0 ? html`<span class="kinds"><${Plain} text=${kinds.join(", ")} /></span>` : null;
}

/**
 * The same, as a link to the first turn that failed.
 * @param {{episode: import("./api.js").Episode}} properties
 */
export function KindLinks({ episode }) {
  const kinds = Object.keys(episode.error_kinds);
  return kinds.length > 0 ? html`<a href=${`#${episode.eid}/error`} title="the first error"><${Kinds} episode=${episode} /></a>` : null;
}
