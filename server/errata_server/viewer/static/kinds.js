/** The kinds of an episode's errors, in one line. */

import { html } from "./html.js";
import { Plain } from "./output.js";

/** @param {{episode: import("./api.js").Episode}} properties */
export function Kinds({ episode }) {
  const kinds = Object.entries(episode.error_kinds).map(([kind, count]) => `${kind} ${count}`);
  return kinds.length > 0 ? html`<span class="kinds"><${Plain} text=${kinds.join(", ")} /></span>` : null;
}
