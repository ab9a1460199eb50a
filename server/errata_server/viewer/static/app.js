/** The viewer: shows the screen that the address names, `?FILTERS` or `#EID/T`. */

import { EpisodeScreen } from "./episode.js";
import { EpisodesScreen } from "./episodes.js";
import { html, render, useEffect, useState } from "./html.js";

function App() {
  const [place, setPlace] = useState(placeNow());
  useEffect(() => {
    const look = () => setPlace(placeNow());
    for (const event of ["hashchange", "popstate"]) addEventListener(event, look);
    return () => {
      for (const event of ["hashchange", "popstate"]) removeEventListener(event, look);
    };
  }, []);
  const { eid, t, search } = place;
  document.title = eid === null ? "Episodes" : t === null ? eid : `${eid} t=${t}`;
  return html`
    <nav aria-label="Screens"><a href=${`./${search}#`} aria-current=${eid === null ? "page" : undefined}>Episodes</a>${eid !== null && html` <span aria-current="page">${eid}</span>`}</nav>
    ${eid === null ? html`<${EpisodesScreen} search=${search} />` : html`<${EpisodeScreen} key=${eid} eid=${eid} t=${t} />`}
  `;
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
