/** What the listed episodes add up to over time, in two small charts. */

import * as api from "./api.js";
import { html, useEffect, useState } from "./html.js";
import { Plain, Trouble } from "./output.js";
import { number } from "./text.js";

const [WIDTH, HEIGHT] = [360, 48];
/** Lengths of buckets, seconds: a shorter one where the one before leaves few. */
const BUCKETS_S = [86400, 3600, 60];
const FEW = 3;
const DIGITS = 3;

/** @param {{query: Record<string, string | null>, search: string, version: number}} properties ``version``: another one reads again. */
export function Sums({ query, search, version }) {
  const [{ buckets, bucket_s }, setSums] = useState({ buckets: /** @type {any[]} */ ([]), bucket_s: 1 });
  const [failure, setFailure] = useState("");
  useEffect(() => {
    const leaving = new AbortController();
    const { sort, order, ...filters } = query;
    (async () => {
      for (const bucket_s of BUCKETS_S) {
        const sums = await api.aggregates({ ...filters, bucket_s }, leaving.signal);
        setSums(sums);
        if (sums.buckets.length > FEW || sums.buckets.length === 0) break;
      }
      setFailure("");
    })().catch((error) => leaving.signal.aborted || setFailure(error.message));
    return () => leaving.abort();
  }, [search, version]);
  if (failure) return html`<${Trouble} text=${`no sums: ${failure}`} />`;
  if (buckets.length === 0) return null;
  const asked = new URLSearchParams(search);
  const only = (/** @type {string} */ kind) => {
    asked.set("error_kind", kind);
    return `?${asked}`;
  };
  const total = (/** @type {string} */ name) => buckets.reduce((sum, bucket) => sum + bucket[name], 0);
  const kinds = new Map();
  for (const bucket of buckets) for (const [kind, count] of Object.entries(bucket.error_kinds)) kinds.set(kind, (kinds.get(kind) ?? 0) + count);
  const most = [...kinds].sort((one, other) => other[1] - one[1]).slice(0, 8);
  return html`
    <section class="sums" aria-label="Sums">
      <figure><figcaption>${total("episodes")} episodes, ${total("done")} done</figcaption><${Bars} buckets=${buckets} width_s=${bucket_s} of=${(/** @type {any} */ bucket) => bucket.episodes} label="Episodes over time" /></figure>
      <figure><figcaption>mean reward ${number(total("reward") / total("episodes"), DIGITS)}${total("done") < total("episodes") ? " so far" : ""}</figcaption><${Bars} buckets=${buckets} width_s=${bucket_s} of=${(/** @type {any} */ bucket) => bucket.reward / bucket.episodes} label="Mean reward over time" /></figure>
      <ul>${most.map(([kind, count]) => html`<li><a href=${only(kind)}><${Plain} text=${kind} /></a> ${count}</li>`)}${kinds.size > most.length && html`<li>and ${kinds.size - most.length} more kinds</li>`}</ul>
    </section>
  `;
}

/** @param {any} bucket */
function time({ start }) {
  return new Date(start * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" });
}

/**
 * A chart with a bar for each bucket; a single one would say nothing.
 * @param {{buckets: any[], width_s: number, of: (bucket: any) => number, label: string}} properties ``width_s``: time from
 *   one bucket to the next; those without episodes are not there.
 */
function Bars({ buckets, width_s, of, label }) {
  if (buckets.length < 2) return null;
  const values = buckets.map(of);
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  const span = high - low || 1;
  const first = buckets[0].start;
  const step = WIDTH / ((buckets[buckets.length - 1].start - first) / width_s + 1);
  return html`
    <svg class="bars" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${label}, at most ${number(high, DIGITS)}`} preserveAspectRatio="none">
      ${values.map((value, index) => {
        const [top, bottom] = [Math.max(value, 0), Math.min(value, 0)];
        return html`<rect x=${((buckets[index].start - first) / width_s) * step} y=${((high - top) / span) * HEIGHT} width=${Math.max(1, step - 1)} height=${Math.max(1, ((top - bottom) / span) * HEIGHT)}><title>${time(buckets[index])}: ${number(value, DIGITS)}</title></rect>`;
      })}
    </svg>
    <small class="axis"><span>${time(buckets[0])}</span><span>${time(buckets[buckets.length - 1])}</span></small>
  `;
}
