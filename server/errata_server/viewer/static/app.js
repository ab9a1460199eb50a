/** The viewer: shows the screen that the address names. */

import { placeOf } from "./address.js";
import { EpisodeScreen } from "./episode.js";
import { EpisodesScreen } from "./episodes.js";
import { FamilyScreen } from "./family.js";
import { GroupScreen } from "./group.js";
import { html, render, useEffect, useState } from "./html.js";
import { LiveScreen } from "./live.js";
import { PairScreen } from "./pair.js";

function App() {
  const [{ place, search }, setPlace] = useState(placeNow());
  useEffect(() => {
    const look = () => setPlace(placeNow());
    for (const event of ["hashchange", "popstate"]) addEventListener(event, look);
    return () => {
      for (const event of ["hashchange", "popstate"]) removeEventListener(event, look);
    };
  }, []);
  document.title = titleOf(place);
  const link = (/** @type {string} */ screen, /** @type {string} */ to, /** @type {string} */ name) =>
    html`<a href=${to} aria-current=${place.screen === screen ? "page" : undefined}>${name}</a>`;
  return html`
    <nav aria-label="Screens">
      ${link("episodes", `./${search}#`, "Episodes")} ${link("live", "#live", "Live")}
      ${(place.screen === "episode" || place.screen === "forks") && html`${link("episode", `#${place.eid}`, place.eid)} ${link("forks", `#forks/${place.eid}`, "Forks")}`}
      ${place.screen === "group" && html`<span aria-current="page">Group</span>`}
      ${place.screen === "compare" && html`${place.eids.map((eid) => html`<a href=${`#${eid}`}>${eid}</a>`)}`}
    </nav>
    ${place.screen === "episodes" && html`<${EpisodesScreen} search=${search} />`}
    ${place.screen === "live" && html`<${LiveScreen} />`}
    ${place.screen === "forks" && html`<${FamilyScreen} eid=${place.eid} />`}
    ${place.screen === "compare" && html`<${PairScreen} eids=${place.eids} />`}
    ${place.screen === "group" && html`<${GroupScreen} labels=${place.labels} />`}
    ${place.screen === "episode" && html`<${EpisodeScreen} key=${place.eid} eid=${place.eid} t=${place.t} />`}
  `;
}

/** @param {import("./address.js").Place} place */
function titleOf(place) {
  if (place.screen === "episodes") return "Episodes";
  if (place.screen === "live") return "Failing now";
  if (place.screen === "forks") return `Forks of ${place.eid}`;
  if (place.screen === "group") return `Group ${place.labels.group}`;
  if (place.screen === "compare") return `${place.eids.join(" and ")}`;
  return place.t === null ? place.eid : `${place.eid} t=${place.t}`;
}

function placeNow() {
  return { place: placeOf(location.hash), search: location.search };
}

render(html`<${App} />`, document.body);
