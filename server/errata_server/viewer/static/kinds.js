/** The kinds of an episode's errors, in one line. */

import { html } from "./html.js";
import { Plain } from "./output.js";

/** @param {{episode: import("./api.js").Episode}} properties */
export function Kinds({ episode }) {
  const kinds = Object.entries(episode.error_kinds).map(([kind, count]) => `${kind} ${count}`);
  return kinds.length > 0 ? html`<span class="kinds"><${Plain} text=${kinds.join(", ")} /></span>` : null;
}

/**
 * The same, each as a link to the first turn that failed so.
 * @param {{episode: import("./api.js").Episode}} properties
 */
export function KindLinks({ episode }) {
  return Object.entries(episode.error_kinds).map(([kind, count], index) => html`${index > 0 && ", "}<a href=${`#${episode.eid}/error/${encodeURIComponent(kind)}`} title="its first turn"><${Plain} text=${kind} /></a> ${count}`);
}
