// Timing: picks a run, follows it while it runs, and sets it against the pinned one.
const q = (s) => element.querySelector(s);
const path = (id, rest) => '/runs/' + encodeURIComponent(id) + (rest || '');
const LIMIT = 100;
let runs = [], chosen = '', followed = true, pinned = '', shownRun = null, base = null, by = 'stage', rank = null, late = 0;

function fail(error) {
  h3.write(q('.tm-alert'), error ? error.message : '');
  q('.tm-alert').hidden = !error;
}

function title(run) {
  const prompt = run.prompt || run.kind;
  return [h3.when(run.created), prompt.length > 48 ? prompt.slice(0, 47) + '…' : prompt, run.plan, run.state].join(' · ');
}

// The run to show unless a person has chosen one: the one that runs, else the newest that began.
function newest() {
  const running = runs.find((r) => r.state === 'running' || r.state === 'cancelling');
  return (running || runs.find((r) => r.started && r.state !== 'queued') || { id: '' }).id;
}

async function list() {
  const answer = await h3.api('/runs?kind=generate&limit=' + LIMIT);
  runs = answer.runs.filter((r) => r.mine || r.prompt);
  pinned = answer.baseline;
  const asked = h3.at().tab === 'timing' ? h3.at().id : '';
  if (asked && asked !== chosen) { chosen = asked; followed = false; }
  if (followed || !chosen) chosen = newest();
  options();
}

function options() {
  const select = q('.tm-run');
  const listed = runs.filter((r) => r.state !== 'queued' || r.id === chosen);
  const items = listed.map((run) => {
    const option = h3.make('option', '', (run.id === pinned ? '◆ ' : '') + title(run));
    option.value = run.id;
    return option;
  });
  if (chosen && !listed.some((r) => r.id === chosen)) {
    const option = h3.make('option', '', chosen);
    option.value = chosen;
    items.push(option);
  }
  select.replaceChildren(...items);
  select.value = chosen;
}

async function fetchTimings() {
  if (!chosen) { shownRun = null; return; }
  const id = chosen;
  const found = await h3.api(path(id, '/timings'));
  if (id !== chosen) return;
  shownRun = found;
  if (!pinned) base = null;
  else if (!base || base.id !== pinned || base.live) base = await h3.api(path(pinned, '/timings')).catch(() => null);
}

// Everything anew; what is asked for while it runs is done once afterwards.
let busy = false, again = false;
async function refresh(whole) {
  if (busy) { again = again || whole || 'some'; return; }
  busy = true;
  try {
    if (whole === true) await list();
    await fetchTimings();
    fail(null);
    draw();
  } catch (error) {
    fail(error);
    if (error.status === 404 && !followed) { followed = true; chosen = ''; again = true; }
  } finally {
    busy = false;
    if (again) { const next = again; again = false; refresh(next === true); }
  }
}

function fact(name, text, soft) {
  const box = h3.make('div', 'fact' + (soft ? ' soft' : ''));
  box.append(named('dt', name), h3.make('dd', '', text));
  return box;
}

function facts(run) {
  const get = Object.fromEntries(run.columns);
  const rows = [['end to end', get.E2E], ['denoise', get.denoise], ['per step', get['per step']], ['video VAE decode', get['video VAE decode']], ['audio VAE decode', get['audio VAE decode']]];
  const none = run.live ? 'not yet' : NOT_MEASURED;
  const boxes = rows.map(([name, x]) => fact(name, x === null ? none : h3.seconds(x), x === null));
  boxes.push(fact('peak memory', run.peak_memory_bytes ? memory(run.peak_memory_bytes) : none, !run.peak_memory_bytes));
  const load = fact('load', get.load === null ? NOT_MEASURED : h3.seconds(get.load), get.load === null);
  load.classList.add('apart');
  q('.tm-facts').replaceChildren(...boxes, load);
}

function conditions(run) {
  q('.tm-shape').replaceChildren(...chips(['plan ' + run.plan, ...shapeWords(run.shape)]));
  q('.tm-conditions').replaceChildren(...Object.entries(run.conditions).flatMap(([name, value]) => [h3.make('dt', '', name), h3.make('dd', '', String(value))]));
}

function partsNote(found) {
  const missing = PARTS.filter((name) => !found.measured.includes(name));
  q('.tm-parts').hidden = !missing.length;
  h3.write(q('.tm-parts'), missing.length ? missing.join(', ') + ' per step: ' + NOT_MEASURED + (missing.length === PARTS.length ? '; the bars are whole steps.' : '.') : '');
}

function ranks(run) {
  const all = ranksOf(run.stages.filter(isBar));
  q('.tm-by').hidden = q('.tm-which').hidden = all.length < 2;
  if (rank !== null && !all.includes(rank)) rank = null;
  const items = [['', 'slowest'], ...all.map((r) => [String(r), 'rank ' + r])].map(([value, text]) => {
    const option = h3.make('option', '', text);
    option.value = value;
    return option;
  });
  if (q('.tm-rank').options.length !== items.length) q('.tm-rank').replaceChildren(...items);
  q('.tm-rank').value = rank === null ? '' : String(rank);
}

async function plots(run) {
  const bars = waterfall(run.stages, by);
  const any = run.stages.some(isBar);
  q('.tm-fall').parentElement.hidden = !any;
  const steps = stepBars(run.stages, rank, against(run) ? base.stages : null, run.shape.steps, h3.family.isLtx(run.shape) ? h3.family.stages() : []);
  const stepped = run.stages.some((s) => s.step >= 0);
  q('.tm-steps').parentElement.hidden = !stepped;
  partsNote(steps);
  try {
    if (any) await h3.plot(q('.tm-fall'), bars.traces, bars.layout);
    if (stepped) await h3.plot(q('.tm-steps'), steps.traces, steps.layout);
  } catch (error) {
    fail(error);
  }
}

// What keeps the two from being compared: names of shape and conditions that differ.
function differing(run) {
  const shape = Object.keys({ ...run.shape, ...base.shape }).filter((k) => k !== 'seed' && String(run.shape[k]) !== String(base.shape[k]));
  const given = Object.keys({ ...run.conditions, ...base.conditions }).filter((k) => run.conditions[k] !== base.conditions[k]);
  const [now, then] = [run, base].map((r) => ranksOf(r.stages.filter(isBar)).length);
  return [shape, now === then ? given : [now + ' ranks instead of ' + then, ...given]];
}

// A run of another family has other stages: nothing of it is set against this one.
const alike = (run) => h3.family.isLtx(run.shape) === h3.family.isLtx(base.shape);
const against = (run) => (base && base.id !== run.id && alike(run) ? base : null);

function baseNote(run) {
  if (!base) return 'No baseline is pinned; pin a run to see what changed against it.';
  if (base.id === run.id) return 'This run is the baseline.';
  if (!alike(run)) return 'The pinned baseline, ' + base.id + ', is a run of another model family; nothing of it is compared with this one.';
  const [shape, given] = differing(run);
  const about = 'Baseline: ' + base.id + ', plan ' + base.plan + '. ';
  if (shape.length) return about + 'Its shape is another one (' + shape.join(', ') + '), so the differences are not of speed alone.';
  return about + (given.length ? 'Same shape; different: ' + given.join(', ') + '.' : 'Same shape and conditions.');
}

function table(run) {
  const other = against(run);
  h3.write(q('.tm-base'), baseNote(run));
  q('.tm-table thead').replaceChildren(tableHead(other ? ['', 'this run', 'baseline', 'difference', ''] : ['', 'seconds']));
  q('.tm-table').classList.toggle('narrow', !other);
  const old = Object.fromEntries(other ? other.columns : []);
  const rows = run.columns.map(([name, x]) => {
    const row = tableRow(name, other ? deltaCells(x, old[name], exact, name) : [[exact(x), x === null ? 'soft' : '']]);
    if (name === 'load') row.className = 'apart';
    return row;
  });
  const peak = run.peak_memory_bytes;
  rows.push(tableRow('peak memory', other ? deltaCells(peak, other.peak_memory_bytes, memory) : [[memory(peak), peak ? '' : 'soft']]));
  q('.tm-table tbody').replaceChildren(...rows);
}

function draw() {
  const run = shownRun;
  q('.tm-empty').hidden = !!run;
  q('.tm-body').hidden = q('.tools').hidden = q('.tm-pick').hidden = !run;
  q('.tm-live').hidden = !run || !run.live;
  if (!run) return;
  element.querySelector('.tm').dataset.run = run.id;
  q('.tm-pin').setAttribute('aria-pressed', run.id === pinned);
  h3.write(q('.tm-pin'), run.id === pinned ? 'Unpin' : 'Pin as baseline');
  for (const [css, rest] of [['.tm-json', '/timings'], ['.tm-csv', '/timings.csv']]) q(css).href = '/api/v1' + path(run.id, rest);
  q('.tm-json').download = run.id + '_timings.json';
  facts(run);
  conditions(run);
  ranks(run);
  plots(run);
  table(run);
}

function press(group, button) {
  for (const node of group.querySelectorAll('button')) node.setAttribute('aria-pressed', node === button);
}

q('.tm-run').addEventListener('change', () => {
  chosen = q('.tm-run').value;
  followed = chosen === newest();
  h3.go('timing', followed ? '' : chosen);
  refresh(false);
});
q('.tm-pin').addEventListener('click', async () => {
  try {
    const on = shownRun.id !== pinned;
    pinned = (await h3.api('/runs/baseline', on ? { method: 'PUT', body: { id: shownRun.id } } : { method: 'DELETE' })).id;
    options();
    refresh(false);
  } catch (error) { fail(error); }
});
q('.tm-open').addEventListener('click', () => h3.go('runs', shownRun.id));
q('.tm-rank').addEventListener('change', () => { rank = q('.tm-rank').value === '' ? null : Number(q('.tm-rank').value); draw(); });
q('.tm-by').addEventListener('click', (event) => {
  const button = event.target.closest('button');
  if (!button) return;
  by = button.dataset.by;
  press(q('.tm-by'), button);
  draw();
});

const all = h3.debounce(150, () => { if (h3.shown(element)) { late = 0; refresh(true); } else late = 1; });
h3.on('job', (job) => {
  const known = runs.find((r) => r.id === job.id);
  if (!known || known.state !== job.state) all(); // how far it is, the timer below follows
}, element);
h3.on('theme', () => { if (shownRun) draw(); }, element); // the bars have colours of the theme
h3.on('queue', all, element);
h3.on('reset', all, element);
h3.on('tab', ({ tab }) => { if (tab === 'timing') { if (!h3.at().id) followed = followed || !chosen; all(); } }, element);
h3.every(1000, element, () => { if (late) { late = 0; refresh(true); } else if (shownRun && shownRun.live) refresh(false); });
refresh(true);
