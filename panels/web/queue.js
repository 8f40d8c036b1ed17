// The queue: order by drag or buttons, edit, duplicate, cancel; the jobs that ended last.
const q = (s) => element.querySelector(s);
const openList = q('.jobs.open'), endedList = q('.jobs.ended'), alertBox = q('.alert');
const STATES = { queued: 'waiting', running: 'running', cancelling: 'cancelling', done: 'done', failed: 'failed', cancelled: 'cancelled', interrupted: 'interrupted' };
const SHOWN_ENDED = 8;
let dragged = '';

function say(text) {
  h3.write(alertBox, text);
  alertBox.hidden = !text;
}

async function attempt(fn) {
  say('');
  try { await fn(); } catch (error) { say(error.message); }
  h3.jobs.refresh();
}

const patch = (id, body) => h3.api('/jobs/' + encodeURIComponent(id), { method: 'PATCH', body });

// Puts a job in front of the one that stands at `to` now (the end of the queue: null).
function move(id, to) {
  const ids = h3.jobs.queued().map((job) => job.id).filter((other) => other !== id);
  attempt(() => patch(id, { before: ids[to] ?? null }));
}

async function edit(job) {
  const { request } = await h3.api('/jobs/' + encodeURIComponent(job.id));
  await h3.load(request, { plan: job.plan, editing: job.id });
  if (matchMedia('(max-width: 860px)').matches) document.querySelector('.form').scrollIntoView(); // it stands far above
}

// An admin sees everybody's jobs; of other users' jobs there is only the place in the queue.
const mayTouch = (job) => job.mine || !!(h3.session && h3.session.admin);

function facts(job) {
  if (!mayTouch(job)) return '';
  if (job.kind === 'parity') return `parity · plan ${job.plan}`;
  const many = job.references.length, refs = !many ? '' : h3.family.isLtx(job) ? ' · first frame' : ` · ${many} reference${many > 1 ? 's' : ''}`;
  return `${job.width}×${job.height} · ${job.frames} f · ${h3.family.steps(job)} · ${job.plan}${refs}`;
}

function waits(job) {
  if (job.ended) return h3.when(job.ended) + (job.started ? ` · took ${h3.seconds(job.ended - job.started)}` : '');
  if (job.state === 'queued') return job.wait_seconds ? `in about ${h3.seconds(job.wait_seconds)}` : '';
  const amount = job.total <= 1 ? '' : h3.family.isLtx(job) && job.stage === 'denoise' ? `, ${h3.family.progress(job)}` : ` ${job.done}/${job.total}`;
  const steps = job.denoise_seconds ? ` · about ${h3.seconds(job.denoise_seconds)} left of it` : '';
  return `${job.stage}${job.total < 100000 ? amount : ''}` + steps + (job.eta_seconds ? ` · ${h3.seconds(job.eta_seconds)} left` : '');
}

function tools(job, index, total) {
  const box = h3.make('div', 'job-tools'), id = job.id, allowed = mayTouch(job);
  const add = (text, label, act, name, off) => {
    const node = h3.button('ico', text, label, act);
    node.dataset.act = name;
    node.disabled = !!off;
    box.append(node);
  };
  if (!allowed) return box;
  if (job.state === 'queued') {
    add('up', 'Move up', () => move(id, index - 1), 'up', index === 0);
    add('down', 'Move down', () => move(id, index + 1), 'down', index === total - 1);
    if (job.kind === 'generate') add('edit', 'Edit in the form', () => attempt(() => edit(job)), 'edit');
  }
  if (job.kind === 'generate') add('copy', 'Duplicate', () => attempt(() => h3.licence.guarded([job.plan], () => h3.jobs.act(id, 'duplicate'))), 'duplicate');
  if (!job.ended) add('close', job.state === 'queued' ? 'Take out of the queue' : 'Cancel', () => attempt(() => h3.jobs.act(id, 'cancel')), 'cancel', job.state === 'cancelling');
  return box;
}

function draggable(li, job, index) {
  li.draggable = true;
  li.addEventListener('dragstart', (event) => { dragged = job.id; event.dataTransfer.effectAllowed = 'move'; event.dataTransfer.setData('text/plain', job.id); });
  li.addEventListener('dragend', () => { dragged = ''; draw(); });
  li.addEventListener('dragover', (event) => { if (dragged) { event.preventDefault(); li.dataset.over = 'above'; } });
  li.addEventListener('dragleave', () => delete li.dataset.over);
  li.addEventListener('drop', (event) => {
    if (!dragged) return;
    event.preventDefault();
    const id = dragged;
    dragged = '';
    move(id, index);
  });
}

function row(job, index, total) {
  const li = h3.make('li', 'job');
  li.dataset.id = job.id;
  li.dataset.state = job.state;
  if (job.id === h3.draft.get().editing) li.dataset.editing = 'yes';
  const show = h3.button('job-show', '', '', () => { if (mayTouch(job) && job.kind === 'generate') h3.emit('choose', job.id); });
  show.disabled = !mayTouch(job) || job.kind !== 'generate';
  const name = mayTouch(job) ? job.prompt || 'no prompt' : 'another user’s job';
  const top = h3.make('span', 'job-top', '', h3.make('span', 'job-state', STATES[job.state]), h3.make('span', 'job-name', job.kind === 'parity' ? 'Parity' : name));
  show.append(top, h3.make('span', 'job-facts', facts(job)), h3.make('span', 'job-wait', waits(job)));
  if (li.dataset.editing) top.append(h3.make('span', 'job-ab job-editing', 'being edited'));
  if (job.group) top.append(h3.make('span', 'job-ab', 'A/B'));
  if (job.owner && !job.mine) top.append(h3.make('span', 'job-ab', job.owner));
  if (job.reason && job.ended && job.state !== 'cancelled') show.append(h3.make('span', 'job-reason', job.reason));
  if (job.thumb && job.state === 'done') {
    const image = h3.make('img', 'job-thumb');
    image.alt = '';
    image.loading = 'lazy';
    image.src = job.thumb;
    image.addEventListener('error', () => image.remove());
    li.append(image);
  }
  li.append(show, tools(job, index, total));
  if (job.state === 'queued' && mayTouch(job)) draggable(li, job, index);
  return li;
}

// A row is made anew only when what it shows has changed: buttons keep their focus.
const made = new Map(); // list -> Map of id -> [text of what it shows, row]
function fill(list, jobs, index) {
  const before = made.get(list) || new Map(), now = new Map();
  const rows = jobs.map((job, i) => {
    const at = index(i), key = JSON.stringify([job, at, jobs.length, h3.draft.get().editing]);
    const kept = before.get(job.id);
    now.set(job.id, kept && kept[0] === key ? kept : [key, row(job, at, index(jobs.length))]);
    return now.get(job.id)[1];
  });
  made.set(list, now);
  if (rows.length !== list.children.length || rows.some((node, i) => list.children[i] !== node)) list.replaceChildren(...rows);
}

function draw() {
  if (dragged) return;
  const active = h3.jobs.active(), queued = h3.jobs.queued(), ended = h3.jobs.ended().slice(0, SHOWN_ENDED);
  fill(openList, [...active, ...queued], (i) => i - active.length);
  fill(endedList, ended, (i) => i);
  q('.ended-title').hidden = !ended.length;
  q('.queue-empty').hidden = active.length + queued.length > 0;
  h3.write(q('.queue-count'), queued.length ? `${queued.length} waiting` : '');
  q('.paused').hidden = !h3.jobs.paused;
  const pause = q('.pause');
  h3.write(pause, h3.jobs.paused ? 'Resume' : 'Pause');
  pause.setAttribute('aria-pressed', h3.jobs.paused);
}

q('.pause').addEventListener('click', () => attempt(() => h3.api('/jobs/queue', { method: 'POST', body: { paused: !h3.jobs.paused } })));
h3.on('jobs', draw, element);
h3.on('draft', ({ changed }) => { if (changed.includes('editing')) draw(); }, element);
h3.on('session', () => { made.clear(); draw(); }, element);
h3.on('trouble', say, element);
if (h3.jobs.loaded) draw();
