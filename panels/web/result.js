// The result card: follows the job that runs, attaches again after a reload, plays what is done.
const q = (s) => element.querySelector(s);
const card = q('.run'), video = q('video'), preview = q('.preview'), screen = q('.screen');
const TITLES = { queued: 'Waiting', running: 'Generating', cancelling: 'Cancelling', done: 'Done', failed: 'Failed', cancelled: 'Cancelled', interrupted: 'Interrupted' };
const AGAIN = ['failed', 'cancelled', 'interrupted'];
let chosen = h3.state('chosen') || '', newest = '', job = null, told = '', frame = '';

const mine = (one) => one.mine && one.kind === 'generate';

function pick() {
  const pinned = chosen && h3.jobs.get(chosen);
  const next = newest && h3.jobs.get(newest);
  if (pinned) return pinned;
  return h3.jobs.active().find(mine) || (next && !next.ended && next) || h3.jobs.ended().find(mine) || h3.jobs.queued().find(mine) || null;
}

function choose(id) {
  chosen = id;
  h3.state('chosen', id || null);
  draw();
}

function phase() {
  if (job.ended) return '';
  if (job.state === 'queued') return job.wait_seconds ? `starts in about ${h3.seconds(job.wait_seconds)}` : '';
  if (!job.total || job.total === 1) return job.stage; // "0 of 1" tells nothing
  return `${job.stage}, ${h3.family.progress(job)}`;
}

function clock() {
  if (!job || !job.started) { h3.write(q('.run-clock'), ''); return; }
  const spent = (job.ended || h3.now()) - job.started;
  const steps = !job.ended && job.denoise_seconds !== null ? ` · denoise: about ${h3.seconds(job.denoise_seconds)} left` : '';
  const left = !job.ended && job.eta_seconds !== null ? ` · about ${h3.seconds(job.eta_seconds)} left` : steps;
  h3.write(q('.run-clock'), h3.seconds(Math.max(0, job.ended ? spent : Math.floor(spent))) + left);
}

function bar() {
  const running = job && ['running', 'cancelling'].includes(job.state), node = q('.bar');
  node.hidden = !running;
  if (!running) return;
  const counted = job.total > 1;
  node.dataset.open = counted ? 'no' : 'yes';
  node.setAttribute('aria-valuemax', job.total || 1);
  node.setAttribute('aria-valuenow', job.done || 0);
  node.setAttribute('aria-valuetext', phase());
  q('.bar-fill').style.width = counted ? `${100 * job.done / job.total}%` : '';
}

// The next preview is decoded before it replaces the one on the screen.
async function showPreview(url) {
  if (!url || url === frame) return;
  frame = url;
  const next = new Image();
  next.src = url;
  try { await next.decode(); } catch (error) { return; } // it went with its run
  if (frame === url) preview.src = url;
  screenOf();
}

function screenOf() {
  const url = job && job.state === 'done' ? job.video : '';
  const moving = !!(job && !job.ended && frame && preview.src);
  if (url && video.getAttribute('src') !== url) video.src = url;
  if (!url && video.hasAttribute('src')) { video.removeAttribute('src'); video.load(); }
  video.hidden = !url;
  preview.hidden = !moving;
  q('.stage-empty').hidden = !!url || moving;
  screen.hidden = !!(job && job.ended && !url); // nothing to see: no black box
  screen.style.aspectRatio = job ? `${job.width} / ${job.height}` : '16 / 9';
  const done = job && h3.family.isLtx(job) ? 'LTX has no preview of its steps; the video appears here when it is done.' : 'The video appears here when it is done.';
  const empty = !job ? 'The video appears here.' : job.state === 'queued' ? 'Waits for its turn.' : done;
  h3.write(q('.stage-empty'), empty);
}

async function again(verb) {
  try {
    const { id } = job, added = await h3.licence.guarded([job.plan], () => h3.jobs.act(id, verb));
    h3.jobs.put([added]);
    h3.emit('queued', added.id);
  } catch (error) { trouble(error.message); }
}

async function newSeed() {
  const { request } = await h3.api('/jobs/' + encodeURIComponent(job.id));
  const seed = String(crypto.getRandomValues(new Uint32Array(1))[0]);
  const body = { request: { ...bare(request), seed }, plans: [job.plan], keep_latents: job.keep_latents };
  const { jobs } = await h3.licence.guarded(body.plans, () => h3.api('/jobs', { method: 'POST', body }));
  h3.jobs.put(jobs);
  h3.emit('queued', jobs[0].id);
}

async function toForm() {
  const { request } = await h3.api('/jobs/' + encodeURIComponent(job.id));
  const missing = await h3.load(request, { plan: job.plan });
  if (missing.length) trouble(`In the form now; not on this console any more: ${missing.join(', ')}.`);
}

// A request as POST wants it: references by media id, and no id of its own. LTX has no references.
const bare = ({ id, ...request }) => (h3.family.isLtx(request) ? request : {
  ...request,
  references: request.references.map(({ kind, media, soundtrack, mute }) => ({ kind, media, soundtrack: soundtrack || null, mute })),
});

function trouble(text) {
  h3.write(q('.run-error'), text);
  q('.run-error').hidden = !text;
}

const act = (text, label, fn) => h3.button('quiet', text, label, () => Promise.resolve(fn()).catch((error) => trouble(error.message)));

function actions() {
  const list = [];
  if (!job.ended) {
    const stop = act('Cancel', 'Cancel this job', () => h3.jobs.act(job.id, 'cancel'));
    stop.id = 'stop';
    stop.classList.add('danger');
    stop.disabled = job.state === 'cancelling';
    list.push(stop);
  }
  if (job.video && job.state === 'done') {
    const save = h3.make('a', 'quiet save', 'Save mp4');
    save.href = job.video;
    save.download = `${job.id}.mp4`;
    list.push(save);
  }
  if (AGAIN.includes(job.state)) list.push(act('Retry', 'Queue this job again', () => again('retry')));
  list.push(act('Load into form', 'Put its settings into the form', toForm));
  if (job.state === 'done') list.push(act('Redo', 'Queue the same again', () => again('duplicate')), act('New seed', 'Queue the same with another seed', newSeed));
  const other = job.group && h3.jobs.all().find((one) => one.group === job.group && one.id !== job.id && one.state === 'done');
  if (other && job.state === 'done') list.push(act('Compare', `Compare it with the run of plan ${other.plan}`, () => h3.go('runs', `${job.id}..${other.id}`)));
  if (job.ended && job.started) list.push(act('Timing', 'Open its times', () => h3.go('timing', job.id)));
  q('.run-acts').replaceChildren(...list);
}

// What the mp4 of an LTX run says of itself.
async function provenance() {
  const box = q('.provenance'), { id } = job;
  if (!h3.family.isLtx(job) || job.state !== 'done' || !job.video) { box.hidden = true; return; }
  const run = await h3.api('/runs/' + encodeURIComponent(id)).catch(() => null);
  if (!job || job.id !== id || !run) return;
  box.replaceChildren(h3.make('span', 'pill', 'AI-generated'), h3.make('span', '', h3.family.provenance(run)));
  box.hidden = false;
}

// What only the record holds: notes, stage times, every field. Asked when the state changed.
async function tell() {
  const key = `${job.id} ${job.state} ${job.stage}`;
  if (key === told) return;
  told = key;
  const id = encodeURIComponent(job.id);
  const detail = await h3.api('/jobs/' + id);
  if (told !== key) return;
  const notes = detail.notes || [];
  provenance();
  q('.notes').replaceChildren(...notes.map((note) => h3.make('li', note.warning ? 'warn' : '', h3.sized(note.text))));
  q('.notes-box').hidden = !notes.length;
  q('.facts-box tbody').replaceChildren(...fieldRows(detail.request, detail.plan_fields));
  q('.facts-box').hidden = false;
  const timings = job.ended && job.started ? await h3.api(`/runs/${id}/timings`).catch(() => null) : null;
  if (told !== key) return;
  q('.times-box tbody').replaceChildren(...(timings ? timeRows(timings) : []));
  q('.times-box').hidden = !timings;
}

function draw() {
  const next = pick();
  if ((next && next.id) !== (job && job.id)) { frame = ''; preview.removeAttribute('src'); q('.notes-box').hidden = q('.times-box').hidden = q('.facts-box').hidden = q('.provenance').hidden = true; }
  const fresh = !job || !next || next.id !== job.id || next.state !== job.state || next.video !== job.video;
  job = next;
  card.dataset.state = job ? job.state : 'idle';
  card.dataset.id = job ? job.id : '';
  h3.write(q('.run-title'), job ? TITLES[job.state] : 'Result');
  h3.write(q('.run-phase'), job ? phase() : '');
  bar();
  clock();
  if (!job) { told = ''; screenOf(); trouble((h3.jobs.engine && h3.jobs.engine.reason) || ''); q('.run-acts').replaceChildren(); h3.write(q('.run-facts'), ''); return; }
  if (job.preview && !job.ended) showPreview(job.preview);
  if (!fresh) { tell().catch(() => { told = ''; }); return; }
  screenOf();
  trouble(job.state === 'cancelled' ? '' : job.reason || '');
  actions();
  h3.write(q('.run-facts'), [`${job.width}×${job.height}`, h3.family.frames(job), h3.family.steps(job), h3.family.sampling(job), `seed ${job.seed}`, `plan ${job.plan}`].filter(Boolean).join(' · '));
  h3.write(q('.run-prompt'), job.prompt);
  q('.run-prompt').hidden = !job.prompt;
  tell().catch(() => { told = ''; });
}

h3.on('jobs', draw, element);
h3.on('preview', ({ id, url }) => { if (job && job.id === id && !job.ended) showPreview(url); }, element);
h3.on('choose', choose, element);
h3.on('queued', (id) => {
  newest = id;
  choose('');
  if (matchMedia('(max-width: 860px)').matches) card.scrollIntoView({ behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth' });
}, element);
h3.every(1000, element, clock);
if (h3.jobs.loaded) draw();
