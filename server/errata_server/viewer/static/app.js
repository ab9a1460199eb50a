/** The viewer: shows the screen that the address names. */

import { placeOf } from "./address.js";
import * as api from "./api.js";
import { setTokens } from "./copies.js";
import { EpisodeScreen } from "./episode.js";
import { EpisodesScreen } from "./episodes.js";
import { FamilyScreen } from "./family.js";
import { GroupScreen } from "./group.js";
import { html, render, useEffect, useState } from "./html.js";
import { LiveScreen } from "./live.js";
import { LoginScreen } from "./login.js";
import { Plain, Trouble } from "./output.js";
import { PairScreen } from "./pair.js";
import { named } from "./text.js";

function App() {
  const [{ place, search }, setPlace] = useState(placeNow());
  useEffect(() => {
    const look = () => setPlace(placeNow());
    for (const event of ["hashchange", "popstate"]) addEventListener(event, look);
    return () => {
      for (const event of ["hashchange", "popstate"]) removeEventListener(event, look);
    };
  }, []);
  const { entry, failure, look } = useEntry();
  document.title = named(titleOf(place));
  if (failure) return html`<main><${Trouble} text=${failure} /></main>`;
  if (entry === null) return html`<main><p class="none">loading</p></main>`;
  if (!entry.signed_in) return html`<${LoginScreen} done=${look} />`;
  const link = (/** @type {string} */ screen, /** @type {string} */ to, /** @type {string} */ name) =>
    html`<a href=${to} aria-current=${place.screen === screen ? "page" : undefined}><${Plain} text=${name} /></a>`;
  return html`
    <nav aria-label="Screens">
      ${link("episodes", `./${search}#`, "Episodes")} ${link("live", "#live", "Failing now")}
      ${(place.screen === "episode" || place.screen === "forks") && html`${link("episode", `#${encodeURIComponent(place.eid)}`, place.eid)} ${link("forks", `#forks/${encodeURIComponent(place.eid)}`, "Forks")}`}
      ${place.screen === "group" && html`<span aria-current="page">Group</span>`}
      ${place.screen === "compare" && html`${place.eids.map((eid) => html`<a href=${`#${encodeURIComponent(eid)}`}><${Plain} text=${eid} /></a>`)}`}
      ${entry.tokens && html`<button class="logout" onClick=${() => api.logout().then(look, look)}>log out</button>`}
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
  if (place.screen === "compare") return place.eids.join(" and ");
  return place.t === null ? place.eid : `${place.eid} t=${place.t}`;
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

function placeNow() {
  return { place: placeOf(location.hash), search: location.search };
}

render(html`<${App} />`, document.body);
