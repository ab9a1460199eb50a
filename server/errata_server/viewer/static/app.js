/** The viewer: shows the screen that the address names, `?FILTERS` or `#EID/T`. */

import * as api from "./api.js";
import { setTokens } from "./copies.js";
import { EpisodeScreen } from "./episode.js";
import { EpisodesScreen } from "./episodes.js";
import { html, render, useEffect, useState } from "./html.js";
import { LoginScreen } from "./login.js";
import { Plain, Trouble } from "./output.js";
import { named } from "./text.js";

function App() {
  const [place, setPlace] = useState(placeNow());
  useEffect(() => {
    const look = () => setPlace(placeNow());
    for (const event of ["hashchange", "popstate"]) addEventListener(event, look);
    return () => {
      for (const event of ["hashchange", "popstate"]) removeEventListener(event, look);
    };
  }, []);
  const { entry, failure, look } = useEntry();
  const { eid, t, search } = place;
  document.title = eid === null ? "Episodes" : named(t === null ? eid : `${eid} t=${t}`);
  if (failure) return html`<main><${Trouble} text=${failure} /></main>`;
  if (entry === null) return html`<main><p class="none">loading</p></main>`;
  if (!entry.signed_in) return html`<${LoginScreen} done=${look} />`;
  return html`
    <nav aria-label="Screens"><a href=${`./${search}#`} aria-current=${eid === null ? "page" : undefined}>Episodes</a>${eid !== null && html` <span aria-current="page"><${Plain} text=${eid} /></span>`}${
      entry.tokens && html` <button class="logout" onClick=${() => api.logout().then(look, look)}>log out</button>`
    }</nav>
    ${eid === null ? html`<${EpisodesScreen} search=${search} />` : html`<${EpisodeScreen} key=${eid} eid=${eid} t=${t} />`}
  `;
}

/** Ask whether this browser may read, now and whenever the server says that it may not. */
function useEntry() {
  const [entry, setEntry] = useState(/** @type {Awaited<ReturnType<typeof api.entry>> | null} */ (null));
  const [failure, setFailure] = useState("");
  const look = () => {
    api.entry().then((found) => {
      setTokens(found.tokens);
      setEntry(found);
    }).catch((error) => setFailure(error.message));
  };
  useEffect(() => {
    look();
    addEventListener("loggedout", look);
    return () => removeEventListener("loggedout", look);
  }, []);
  return { entry, failure, look };
}

/** Return what the address names. */
function placeNow() {
  const [eid, t] = location.hash.slice(1).split("/").map(decoded);
  return { eid: eid || null, t: /^[0-9]{1,15}$/.test(t ?? "") ? Number(t) : null, search: location.search };
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

render(html`<${App} />`, document.body);
