/** Runs one task again and again, and never twice at a time. */

const AGAIN_MS = 5000;

/**
 * Return a function that runs a task. Asked for while the task runs, it runs once more after that; where it fails it
 * is tried again after 5 s.
 * @param {() => Promise<void>} task
 * @param {(failure: string) => void} tell Called with why the task failed, and with "" when it has succeeded.
 * @param {AbortSignal} signal Ends it.
 * @param {number} [pace_ms] Shortest time from the end of one run to the beginning of the next.
 */
export function serial(task, tell, signal, pace_ms = 0) {
  let runs = false;
  let wanted = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let later;
  signal.addEventListener("abort", () => clearTimeout(later));
  const run = async () => {
    if (signal.aborted) return;
    if (runs) {
      wanted = true;
      return;
    }
    clearTimeout(later);
    runs = true;
    wanted = false;
    let rest_ms = pace_ms;
    try {
      await task();
      tell("");
    } catch (error) {
      if (signal.aborted) return;
      tell(/** @type {Error} */ (error).message);
      wanted = true;
      rest_ms = AGAIN_MS;
    }
    const next = () => {
      runs = false;
      if (wanted) run();
    };
    if (rest_ms > 0) later = setTimeout(next, rest_ms);
    else next();
  };
  return run;
}
