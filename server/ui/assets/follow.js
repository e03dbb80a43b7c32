// Views that look again when an event concerns them.

/** Time after an event until it is looked at, together with those that come meanwhile, ms. */
const SETTLE_MS = 300;
/** Time between two looks while there are no events, ms: ages are shown, and a token may be taken away. */
const REFRESH_MS = 10_000;

/**
 * Makes `context.refresh`, which calls `look`, one at a time and once more if it was asked for meanwhile; and calls it
 * some time after each event that `concerns` the view, and now and then without one.
 */
export function follow(context, look, concerns) {
  let looking = false;
  let again = false;
  context.refresh = async () => {
    again = true;
    if (looking) return;
    looking = true;
    try {
      while (again && !context.signal.aborted) {
        again = false;
        await look();
        context.fresh();
      }
    } catch (error) {
      context.stale(error);
    } finally {
      looking = false;
    }
  };
  let timer;
  context.event = (event) => {
    if (timer || !(event.event === "missed" || concerns(event))) return;
    timer = setTimeout(() => {
      timer = undefined;
      context.refresh();
    }, SETTLE_MS);
  };
  const regularly = setInterval(() => document.hidden || context.refresh(), REFRESH_MS);
  context.signal.addEventListener("abort", () => {
    clearTimeout(timer);
    clearInterval(regularly);
  });
}
