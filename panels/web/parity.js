// Parity: choose goldens and settings, run them as a job, watch it, read how far both are apart.
const q = (css) => element.querySelector(css);
const STATES = { queued: 'waits', running: 'runs', cancelling: 'is being cancelled', done: 'done', failed: 'failed', cancelled: 'cancelled', interrupted: 'interrupted' };
const OVER = ['done', 'failed', 'cancelled', 'interrupted'];
let job = null, report = null, picked = '', chosen = [], seen = '';

function alert(text) {
  h3.write(q('.pa-alert'), text);
  q('.pa-alert').hidden = !text;
}

async function attempt(work) {
  alert('');
  try { return await work(); } catch (error) { alert(error.message); return undefined; }
}

const list = goldenList(element, (ids) => { chosen = ids; buttons(); }, alert);
const cases = caseView(q('.pa-case'));
const pictures = frameView(q('.pa-frames'));

function buttons() {
  q('.pa-go').disabled = !chosen.length;
  h3.write(q('.pa-go'), chosen.length ? 'Run ' + chosen.length + (chosen.length === 1 ? ' golden' : ' goldens') : 'Run');
}

// ---- settings

function plans(found) {
  const kept = q('.pa-plan').value;
  h3.fill(q('.pa-plan'), found.map((plan) => plan.name), kept, 'As captured: each golden’s own');
  hint();
}

function hint() {
  const name = q('.pa-plan').value;
  h3.write(q('.pa-hint'), name
    ? 'Attention, norm kernel and device come from plan ' + name + '. Where plan and golden contradict each other (dtype, quantised activations) the case is unsupported; no other backend steps in.'
    : 'On the CPU, pinned to the code paths of the capture, so that bit equality can be asked for.');
}

// ---- the run

function counts() {
  const found = {};
  for (const r of report.results) found[r.status] = (found[r.status] || 0) + 1;
  q('.pa-counts').replaceChildren(...Object.entries(found).map(([status, n]) => {
    const pill = h3.make('span', 'pill', n + ' ' + status);
    pill.dataset.status = status;
    return h3.make('li', '', '', pill);
  }));
}

function where(d) {
  if (!d) return '';
  return (d.step === null ? '' : 'step ' + (d.step + 1) + ' · ') + (d.step === null ? d.stage : (d.part + ' ' + d.quantity).trim());
}

function caseRow(result, index) {
  const open = h3.button('rv-link', nameOf(result), 'Show ' + nameOf(result), () => show(index));
  const pill = h3.make('span', 'pill', result.status);
  pill.dataset.status = result.status;
  const d = result.divergence && (result.divergence.staged || result.divergence.free);
  const th = h3.make('th', 'left', '', open);
  th.scope = 'row';
  const words = result.divergence ? result.reason || (d ? d.run + ', ' + where(d) : '') : result.reason || result.first;
  const tr = h3.make('tr', '', '', th, h3.make('td', 'left', '', pill), h3.make('td', '', result.equal + ' / ' + result.compared), h3.make('td', 'wrap pa-wide', words));
  tr.append(h3.make('td', 'wrap soft', d ? gateOf(d) : ''), h3.make('td', '', h3.seconds(result.seconds)));
  tr.dataset.status = result.status;
  tr.dataset.golden = result.golden || '';
  tr.dataset.here = String(result.golden === picked && !!picked);
  open.disabled = !result.golden; // while the run goes on there are no figures yet
  return tr;
}

function drawRun() {
  const over = OVER.includes(job.state);
  q('.pa-run').hidden = false;
  q('.pa-state').dataset.state = job.state;
  h3.write(q('.pa-state'), STATES[job.state]);
  const took = report && report.seconds ? h3.seconds(report.seconds) + ' on ' + report.device : '';
  const settings = report ? (report.as_captured ? 'as captured' : 'plan ' + job.plan) : '';
  h3.write(q('.pa-stage'), [settings, over ? took : job.stage, over ? h3.when(job.created) : ''].filter(Boolean).join(' · '));
  q('.pa-bar').hidden = over;
  q('.pa-bar').dataset.open = job.total ? 'no' : 'yes';
  q('.pa-bar').setAttribute('aria-valuemax', job.total || 1);
  q('.pa-bar').setAttribute('aria-valuenow', job.done);
  q('.pa-bar .bar-fill').style.width = job.total ? (100 * job.done) / job.total + '%' : '';
  h3.write(q('.pa-reason'), job.reason);
  q('.pa-reason').hidden = !job.reason;
  q('.pa-cancel').hidden = over || job.state === 'cancelling';
  q('.pa-again').hidden = !over;
  q('.pa-cases-box').hidden = !report || !report.results.length;
  if (!report) return;
  counts();
  q('.pa-cases tbody').replaceChildren(...report.results.map(caseRow));
}

async function show(index) {
  const result = report.results[index], id = job.id;
  const found = await attempt(() => h3.api('/parity/' + id + '/cases/' + index));
  if (!found || !job || job.id !== id) return;
  picked = result.golden;
  q('.pa-case').hidden = false;
  cases.show(result, found.details);
  pictures.show(result.frames, '/api/v1/parity/' + id + '/frames/' + index + '/');
  drawRun();
}

async function open(id) {
  const found = await attempt(() => h3.api('/parity/' + encodeURIComponent(id)));
  if (!found) return;
  const other = !job || job.id !== found.job.id;
  job = found.job;
  report = found;
  if (other) { picked = ''; q('.pa-case').hidden = true; }
  drawRun();
  if (q('.pa-history').value !== id) await history();
  if (job.state === 'done' && !picked && report.results.length) {
    const bad = report.results.findIndex((r) => r.status === 'FAIL');
    await show(Math.max(0, bad));
  }
}

function described(run) {
  const how = Object.entries(run.counts).map(([status, n]) => n + ' ' + status).join(', ') || STATES[run.job.state];
  const what = run.goldens.length === 1 ? run.goldens[0].split('/').pop() : run.goldens.length + ' goldens';
  return h3.when(run.job.created) + ' · ' + what + ' · ' + (run.as_captured ? 'as captured' : run.job.plan) + ' · ' + how;
}

async function history() {
  const found = await attempt(() => h3.api('/parity'));
  if (!found) return [];
  const options = found.runs.map((run) => new Option(described(run), run.job.id));
  if (job && !found.runs.some((run) => run.job.id === job.id)) options.push(new Option(job.id, job.id));
  q('.pa-history').replaceChildren(...options);
  if (job) q('.pa-history').value = job.id;
  return found.runs;
}

// ---- what a person does, and what the console tells

q('.pa-start').addEventListener('submit', async (event) => {
  event.preventDefault();
  q('.pa-go').disabled = true;
  const made = await attempt(() => h3.api('/parity', { method: 'POST', body: { goldens: chosen, plan: q('.pa-plan').value } }));
  buttons();
  if (!made) return;
  h3.go('parity', made.job.id);
});
q('.pa-plan').addEventListener('change', hint);
q('.pa-history').addEventListener('change', () => h3.go('parity', q('.pa-history').value));
q('.pa-cancel').addEventListener('click', () => attempt(() => h3.api('/jobs/' + job.id + '/cancel', { method: 'POST' })));
q('.pa-again').addEventListener('click', () => {
  list.choose(report.goldens);
  q('.pa-choose').scrollIntoView({ block: 'start' });
});

h3.on('job', (told) => {
  if (!job || told.id !== job.id) return;
  const moved = told.state !== job.state || told.done !== job.done;
  job = told;
  drawRun();
  if (moved) open(job.id).then(() => { if (OVER.includes(told.state)) history(); });
}, element);
h3.on('plans', plans, element);
h3.on('reset', () => { if (job) open(job.id); history(); }, element);
h3.on('tab', (place) => {
  if (place.tab !== 'parity' || !place.id || place.id === seen) return;
  seen = place.id;
  open(place.id);
}, element);

async function start() {
  buttons();
  await attempt(() => Promise.all([list.refresh(), h3.plans.get() ? plans(h3.plans.get()) : h3.plans.refresh()]));
  const runs = await history(), here = h3.at();
  const id = here.tab === 'parity' && here.id ? here.id : runs.length ? runs[0].job.id : '';
  seen = id;
  if (id) await open(id);
}
start();
