// The samples that this page holds: those of the window, fetched again where some are missing.
function readings(changed) {
  const MOST = 400; // samples fetched at once
  const held = { info: null, samples: [], marks: [], hz: 1, error: '' };
  let span = 120, busy = false, again = '';

  const last = () => (held.samples.length ? held.samples[held.samples.length - 1].t : 0);

  function trim() {
    const oldest = last() - span - 5;
    let gone = 0;
    while (gone < held.samples.length && held.samples[gone].t < oldest) gone += 1;
    held.samples.splice(0, gone);
    const run = held.marks.findLastIndex((m) => m.t < oldest && m.kind === 'run'); // of what goes on
    held.marks = held.marks.filter((m, i) => m.t >= oldest || i >= Math.max(0, run));
  }

  // What the lists hold changes only by whole answers and by single events, always in order.
  function add(samples, marks) {
    const newest = last(), mark = held.marks.length ? held.marks[held.marks.length - 1].t : 0;
    held.samples.push(...samples.filter((s) => s.t > newest));
    held.marks.push(...marks.filter((m) => m.t > mark));
    trim();
  }

  async function ask(whole) {
    if (busy) { again = whole ? 'whole' : again || 'rest'; return; }
    busy = true;
    try {
      if (whole || !held.info) held.info = await h3.api('/telemetry/info');
      const since = whole ? h3.now() - span : last();
      const answer = await h3.api('/telemetry?most=' + MOST + '&since=' + Math.max(0, since).toFixed(3));
      if (whole) { held.samples = []; held.marks = []; }
      held.hz = answer.hz;
      add(answer.samples, answer.marks);
      const newest = answer.samples[answer.samples.length - 1];
      if (newest && newest.gpus.length !== held.info.gpus.length) held.info = await h3.api('/telemetry/info');
      held.error = '';
    } catch (error) {
      held.error = error.message;
    } finally {
      busy = false;
    }
    changed();
    if (again) { const next = again; again = ''; ask(next === 'whole'); }
  }

  // One sample of the event stream; what lies between it and the last one is fetched.
  function sample(s) {
    const step = s.t - last();
    if (held.hz > 1 || step < 0.8 || step > 3) ask(false);
    else { add([s], []); changed(); }
  }

  function window_(seconds) {
    span = seconds;
    ask(true);
  }

  return { held, sample, mark: (m) => { add([], [m]); changed(); }, show: window_, whole: () => ask(true), rest: () => ask(false), last };
}
