// h3.jobs: the jobs as the console knows them, kept fresh by events; `jobs` is emitted on a change.
(() => {
  const LIMIT = 60;
  const known = new Map(); // id -> JobJson
  const store = { paused: false, engine: null, loaded: false };
  let running = false, again = false;
  let heard = [], heardEngine = null; // events that came while an answer was under way: they may be newer

  const WAITING = ['queued'];
  const ACTIVE = ['running', 'cancelling'];
  const all = () => [...known.values()];
  const active = () => all().filter((job) => ACTIVE.includes(job.state));
  const queued = () => all().filter((job) => WAITING.includes(job.state)).sort((a, b) => a.position - b.position);
  const ended = () => all().filter((job) => job.ended).sort((a, b) => b.ended - a.ended);

  // Asks for everything again; calls while one is under way become one more.
  async function refresh() {
    if (running) { again = true; return; }
    running = true;
    heard = [];
    heardEngine = null;
    try {
      const answer = await h3.api('/jobs?limit=' + LIMIT);
      known.clear();
      for (const job of [...answer.jobs, ...heard]) known.set(job.id, job);
      Object.assign(store, { paused: answer.paused, engine: heardEngine || answer.engine, loaded: true });
      h3.emit('jobs', store);
    } catch (error) {
      if (h3.online()) h3.emit('trouble', error.message);
    } finally {
      running = false;
      if (again) { again = false; refresh(); }
    }
  }

  const soon = h3.debounce(60, refresh);

  // Jobs of an answer to POST, known before the list is asked again.
  function put(jobs) {
    for (const job of jobs) known.set(job.id, job);
    h3.emit('jobs', store);
    refresh();
  }

  // One change of a job by the REST path of its verb; the list is asked again either way.
  async function act(id, verb, body) {
    try {
      return await h3.api(`/jobs/${encodeURIComponent(id)}${verb ? '/' + verb : ''}`, { method: 'POST', body });
    } finally {
      refresh();
    }
  }

  h3.on('job', (job) => {
    const before = known.get(job.id);
    known.set(job.id, job);
    if (running) heard.push(job);
    if (!before || before.state !== job.state) soon(); // positions and waits of the others moved
    h3.emit('jobs', store);
  });
  h3.on('queue', soon);
  h3.on('engine', (engine) => { store.engine = heardEngine = engine; h3.emit('jobs', store); });
  h3.on('reset', soon);

  h3.jobs = Object.assign(store, { get: (id) => known.get(id), all, active, queued, ended, put, refresh, act });
})();
