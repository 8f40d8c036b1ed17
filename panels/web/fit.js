// Plans and the preflight card: whether the request fits this machine on this plan, and why.
const q = (s) => element.querySelector(s);
const fit = q('.fit'), gone = q('.plan-gone');
const VERDICTS = { fits: 'fits', tight: 'tight', no: 'does not fit', unknown: 'not known' };
const ROLES = { dit: 'denoiser', text_encoder: 'text encoder', video_vae: 'video VAE', audio_vae: 'audio VAE', vocoder: 'vocoder', upsampler: 'latent upsampler' };
const PATIENCE_MILLISECONDS = 500; // an older answer stands no longer than this
let asking = null, opened = false;

const isLtx = () => h3.family.isLtx(h3.draft.get());
const rows = (n) => (n === null || n === undefined ? '–' : n.toLocaleString('en'));

function pill(verdict, text) {
  const node = h3.make('span', 'pill', text || VERDICTS[verdict]);
  node.dataset.verdict = verdict;
  return node;
}

function amounts(need) {
  const say = need.what === 'time' ? h3.seconds : h3.bytes;
  if (need.needed === null) return { unknown: 'not known', fits: 'none needed' }[need.verdict] || '';
  return need.available === null ? say(need.needed) : `${say(need.needed)} of ${say(need.available)}`;
}

function needRow(need, name) {
  const tr = h3.make('tr'), th = h3.make('th', '', name);
  th.scope = 'row';
  const why = h3.make('td', 'fit-why', need.reason);
  tr.append(th, h3.make('td', 'fit-amount', amounts(need)), h3.make('td', '', '', pill(need.verdict)), why);
  return tr;
}

function details(estimate) {
  const box = h3.make('details', 'more'), list = h3.make('ul', 'fit-list');
  box.open = opened;
  box.addEventListener('toggle', () => { opened = box.open; });
  const r = estimate.rows;
  if (isLtx()) list.append(h3.make('li', '', `Tokens at full size: video ${rows(r.video)}, audio ${rows(r.audio)}; text ${rows(r.text)} beside them`));
  else list.append(h3.make('li', '', `Rows: text ${rows(r.text)}, references ${rows(r.references)}, video ${rows(r.video)}, audio ${rows(r.audio)}` + (r.negative ? `; negative side ${rows(r.negative)}` : '')));
  if (estimate.mode_note) list.append(h3.make('li', '', estimate.mode_note));
  for (const phase of estimate.vram.phases) list.append(h3.make('li', '', `${phase.name}: ${h3.bytes(phase.bytes)}`));
  for (const file of estimate.files) {
    list.append(h3.make('li', file.problem ? 'bad' : '', `${ROLES[file.role] || file.role}: ${file.name}` + (file.problem ? ` – ${file.problem}` : `, ${h3.bytes(file.bytes)}, ${file.stored}`)));
  }
  box.append(h3.make('summary', '', isLtx() ? 'Files, tokens and phases' : 'Files, rows and phases'), list);
  return box;
}

function show(estimate) {
  const top = h3.make('div', 'fit-top');
  const mode = h3.make('span', 'fit-mode', `mode ${estimate.mode}`);
  mode.title = estimate.mode_note;
  const total = rows(estimate.rows.total);
  top.append(pill(estimate.verdict), h3.make('span', 'fit-rows', isLtx() ? `${total} tokens at full size` : `S = ${total} rows`), ...(isLtx() ? [] : [mode]));
  const table = h3.make('table', 'fit-table'), body = h3.make('tbody');
  body.append(needRow(estimate.vram, 'VRAM'), needRow(estimate.ram, 'RAM'), needRow(estimate.disk, 'Disk'), needRow(estimate.time, 'Time'));
  table.append(body);
  fit.dataset.verdict = estimate.verdict;
  const stop = estimate.blocked || estimate.needs_force;
  const warnings = estimate.warnings.filter((text) => text !== stop).map((text) => h3.make('p', 'fit-warn', text));
  fit.style.minHeight = '';
  fit.replaceChildren(top, ...(stop ? [h3.make('p', 'fit-stop', stop)] : []), ...warnings, table, details(estimate));
}

// The other plan of an A/B in one line: its verdict, and why it is not "fits".
function second(estimate, plan) {
  const needs = [estimate.vram, estimate.ram, estimate.disk, estimate.time].filter((need) => need.verdict === estimate.verdict);
  const why = estimate.blocked || estimate.needs_force || (estimate.verdict === 'fits' ? '' : needs.map((need) => need.reason).join(' '));
  fit.append(h3.make('div', 'fit-top', '', pill(estimate.verdict), h3.make('span', 'fit-rows', plan), h3.make('span', '', why)));
}

// What counts for the button: the worse verdict, and whatever stops either plan.
function both(a, b) {
  const order = ['fits', 'unknown', 'tight', 'no'], verdict = order[Math.max(order.indexOf(a.verdict), order.indexOf(b.verdict))];
  return { ...a, verdict, blocked: a.blocked || b.blocked, needs_force: a.needs_force || b.needs_force };
}

function sayFit(text, verdict) {
  fit.dataset.verdict = verdict || '';
  fit.replaceChildren(h3.make('p', verdict ? 'fit-stop' : 'fit-wait', text));
}

// What is not counted yet gets no verdict; the card keeps its height, so nothing jumps.
function wait() {
  fit.style.minHeight = `${fit.offsetHeight}px`;
  sayFit(isLtx() ? 'Counting the tokens…' : h3.draft.get().references.length ? 'Measuring the references…' : 'Counting the rows…');
  h3.emit('estimate', null);
}

// Asks for the estimate of the draft; gives it to everybody (null: there is none now).
async function preflight() {
  if (!h3.session || !h3.plans.get()) return; // the draft of this user, or what it may name, is not there yet
  if (asking) asking.abort();
  asking = new AbortController();
  const { signal } = asking, late = setTimeout(wait, PATIENCE_MILLISECONDS);
  try {
    const { plan, plan_b } = h3.draft.get(), request = h3.form();
    const ask = (name) => h3.api('/preflight', { method: 'POST', body: { request, plan: name }, signal });
    const [estimate, other] = await Promise.all([ask(plan), plan_b ? ask(plan_b) : null]);
    clearTimeout(late);
    show(estimate);
    if (other) second(other, plan_b);
    h3.emit('estimate', other ? both(estimate, other) : estimate);
  } catch (error) {
    if (error.name === 'AbortError') return;
    fit.style.minHeight = '';
    sayFit(error.message, 'no');
    h3.emit('estimate', null);
  } finally {
    clearTimeout(late);
  }
}

const preflightSoon = h3.debounce(300, () => { if (h3.alive(element)) preflight(); });

function fillPlans() {
  const d = h3.draft.get();
  h3.plans.choices(q('#plan'), d.plan);
  h3.plans.choices(q('#plan-b'), d.plan_b, { none: 'nothing', only: d.family });
}

function sayGone(text) {
  h3.write(gone, text);
  gone.hidden = !text;
}

// What became of a plan that the draft named, until another choice is made.
const lost = () => h3.draft.lost('plan').forEach(sayGone);

function plans() {
  h3.plans.refresh().catch((error) => sayFit(error.message, 'no'));
}

h3.on('draft', ({ changed }) => {
  if (changed.includes('family')) fillPlans();
  if (changed.includes('plan_b')) sayGone('');
  if (changed.includes('references')) { if (asking) asking.abort(); wait(); }
  preflightSoon();
}, element);
h3.on('session', preflightSoon, element);
h3.on('plans', () => { fillPlans(); preflightSoon(); }, element);
h3.on('tab', ({ tab }) => { if (tab === 'generate') preflightSoon(); }, element);
h3.on('lost', lost, element);
h3.on('reset', plans, element);
h3.draft.bind(element);
fillPlans();
lost();
preflight();
plans();
