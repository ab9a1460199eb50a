/** What the listed episodes add up to over time, in two small charts. */

import * as api from "./api.js";
import { html, useEffect, useState } from "./html.js";
import { Plain, Trouble } from "./output.js";
import { number } from "./text.js";

const [WIDTH, HEIGHT] = [360, 48];
const FEW_DAYS = 3; // of so few the hours are shown

/** @param {{query: Record<string, string | null>, search: string, version: number}} properties ``version``: another one reads again. */
export function Sums({ query, search, version }) {
  const [buckets, setBuckets] = useState(/** @type {any[]} */ ([]));
  const [failure, setFailure] = useState("");
  useEffect(() => {
    const leaving = new AbortController();
    const { sort, order, ...filters } = query;
    (async () => {
      const days = (await api.aggregates({ ...filters, bucket_s: 86400 }, leaving.signal)).buckets;
      const few = days.length > 0 && days.length <= FEW_DAYS;
      setBuckets(few ? (await api.aggregates({ ...filters, bucket_s: 3600 }, leaving.signal)).buckets : days);
      setFailure("");
    })().catch((error) => leaving.signal.aborted || setFailure(error.message));
    return () => leaving.abort();
  }, [search, version]);
  if (failure) return html`<${Trouble} text=${`no sums: ${failure}`} />`;
  if (buckets.length === 0) return null;
  const total = (/** @type {string} */ name) => buckets.reduce((sum, bucket) => sum + bucket[name], 0);
  const kinds = new Map();
  for (const bucket of buckets) for (const [kind, count] of Object.entries(bucket.error_kinds)) kinds.set(kind, (kinds.get(kind) ?? 0) + count);
  const most = [...kinds].sort((one, other) => other[1] - one[1]).slice(0, 8);
  return html`
    <section class="sums" aria-label="Sums">
      <figure><figcaption>${total("episodes")} episodes, ${total("done")} done</figcaption><${Bars} values=${buckets.map((bucket) => bucket.episodes)} label="Episodes over time" /></figure>
      <figure><figcaption>mean reward ${number(total("reward") / total("episodes"))}</figcaption><${Bars} values=${buckets.map((bucket) => bucket.reward / bucket.episodes)} label="Mean reward over time" /></figure>
      <ul>${most.map(([kind, count]) => html`<li><a href=${`?error_kind=${encodeURIComponent(kind)}`}><${Plain} text=${kind} /></a> ${count}</li>`)}</ul>
    </section>
  `;
}

/** @param {{values: number[], label: string}} properties */
function Bars({ values, label }) {
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  const span = high - low || 1;
  const step = WIDTH / values.length;
  return html`
    <svg class="bars" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${label} preserveAspectRatio="none">
      ${values.map((value, index) => {
        const [top, bottom] = [Math.max(value, 0), Math.min(value, 0)];
        return html`<rect x=${index * step} y=${((high - top) / span) * HEIGHT} width=${Math.max(1, step - 1)} height=${Math.max(1, ((top - bottom) / span) * HEIGHT)} />`;
      })}
    </svg>
  `;
}
