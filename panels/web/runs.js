// Runs: the filtered history, and by the address one run (#runs/ID) or two (#runs/A..B).
const q = (s) => element.querySelector(s);
const PAGE = 48;
let runs = [], more = false, chosen = [], place = '', loading = 0, stale = false;

function fail(error) {
  h3.write(q('.rv-alert'), error ? error.message : '');
  q('.rv-alert').hidden = !error;
  if (error) q('.rv-alert').scrollIntoView({ block: 'nearest' });
}

// A deleted run leaves the list before it is shown again, or its picture would be asked for.
function gone(id) {
  runs = runs.filter((run) => run.id !== id);
  chosen = chosen.filter((x) => x !== id);
  draw();
  h3.go('runs');
}

const one = runView(q('.rv-one'), fail, gone);
const two = compareView(q('.rv-two'), fail);

function options(select, items, first) {
  const value = select.value;
  select.replaceChildren(...[['', first], ...items].map(([key, text]) => {
    const option = h3.make('option', '', text);
    option.value = key;
    return option;
  }));
  select.value = [...select.options].some((o) => o.value === value) ? value : '';
}

const day = (text, add) => {
  if (!text) return '';
  const [year, month, date] = text.split('-').map(Number);
  return String(new Date(year, month - 1, date + add).getTime() / 1000); // days of this browser's zone
};

function query(before) {
  const found = new URLSearchParams({ limit: PAGE });
  const wanted = { q: q('.rv-q').value.trim(), plan: q('.rv-plan').value, state: q('.rv-state').value, kind: q('.rv-kind').value, from: day(q('.rv-from').value, 0), to: day(q('.rv-to').value, 1), before };
  for (const [name, value] of Object.entries(wanted)) if (value) found.set(name, value);
  return found;
}

const filtered = () => ['.rv-q', '.rv-plan', '.rv-state', '.rv-kind', '.rv-from', '.rv-to'].some((s) => q(s).value);

function thumb(run) {
  const box = h3.make('div', 'rv-thumb');
  box.style.aspectRatio = '16 / 9';
  if (!run.thumb) {
    box.append(h3.make('span', '', run.kind === 'parity' ? 'parity' : run.state === 'done' ? 'no video' : STATE_WORDS[run.state]));
    return box;
  }
  const image = h3.make('img');
  image.loading = 'lazy';
  image.alt = '';
  image.src = run.thumb;
  image.addEventListener('error', () => image.replaceWith(h3.make('span', '', 'no picture')));
  box.append(image);
  return box;
}

function card(run) {
  const li = h3.make('li', 'rv-card');
  li.dataset.id = run.id;
  li.dataset.state = run.state;
  const open = h3.make('a', 'rv-open');
  open.href = location.pathname + location.search + '#runs/' + encodeURIComponent(run.id);
  open.target = '_self'; // the page's base names another target
  const words = h3.make('span', 'rv-words');
  const facts = [run.plan, run.width ? run.width + 'x' + run.height : '', run.frames ? plural(run.frames, 'frame') : '', run.steps ? h3.family.steps(run) : ''];
  const state = badge(run.state), time = h3.make('span', '', [h3.when(run.created), duration(run)].filter(Boolean).join(' · '));
  words.append(h3.make('span', 'rv-title', run.prompt || (run.kind === 'parity' ? 'Parity run' : 'No prompt')), h3.make('span', 'rv-line', '', state, time), h3.make('span', 'rv-line', facts.filter(Boolean).join(' · ')));
  open.append(thumb(run), words);
  li.append(open);
  if (run.kind === 'generate' && run.state !== 'queued') {
    const pick = h3.make('label', 'rv-pick'), box = h3.make('input');
    box.type = 'checkbox';
    box.checked = chosen.includes(run.id);
    box.setAttribute('aria-label', 'Compare this run');
    box.addEventListener('change', () => choose(run.id, box.checked));
    pick.append(box);
    li.append(pick);
  }
  return li;
}

// At most two: a third takes the place of the first.
function choose(id, on) {
  chosen = chosen.filter((x) => x !== id);
  if (on) chosen = [...chosen, id].slice(-2);
  for (const li of element.querySelectorAll('.rv-card')) {
    const box = li.querySelector('input'), mine = chosen.includes(li.dataset.id);
    if (box) box.checked = mine;
    li.dataset.chosen = mine;
  }
  bar();
}

function bar() {
  q('.rv-chosen').hidden = !chosen.length;
  const found = chosen.map((id) => runs.find((run) => run.id === id)).filter(Boolean);
  const mixed = found.length === 2 && found[0].family !== found[1].family;
  const two = mixed ? 'Runs of two model families: there is nothing to compare' : 'Two runs chosen';
  h3.write(q('.rv-count'), chosen.length === 2 ? two : 'One run chosen; choose another to compare');
  q('.rv-compare').disabled = chosen.length !== 2 || mixed;
}

function draw() {
  q('.rv-empty').hidden = !!runs.length;
  h3.write(q('.rv-empty'), filtered() ? 'No run matches these filters.' : 'No run yet. What you generate is kept here.');
  q('.rv-runs').replaceChildren(...runs.map(card));
  q('.rv-more').hidden = !more;
  q('.rv-clear').hidden = !filtered();
  choose('', false);
}

async function refresh(older) {
  const mine = ++loading;
  try {
    const last = older === true && runs.length ? runs[runs.length - 1].id : '';
    const answer = await h3.api('/runs?' + query(last));
    if (mine !== loading) return;
    runs = last ? [...runs, ...answer.runs] : answer.runs;
    more = answer.more;
    if (!place) fail(null);
    draw();
  } catch (error) {
    if (mine === loading) fail(error);
  }
}

async function plans() {
  const answer = await h3.api('/plans');
  const names = new Set([...answer.plans.map((p) => p.name), ...runs.map((r) => r.plan)]);
  options(q('.rv-plan'), [...names].sort().map((name) => [name, name]), 'Any plan');
}

function layout(as) {
  q('.rv-runs').dataset.as = as;
  for (const node of q('.rv-as').querySelectorAll('button')) node.setAttribute('aria-pressed', node.dataset.as === as);
  h3.state('runs.as', as);
}

// What the address asks for: the list, one run, or two.
function route({ tab, id }) {
  if (tab !== 'runs') { two.close(); q('.rv-one video').pause(); place = ''; return; }
  const pair = id.split('..');
  if (id !== place) fail(null);
  place = id;
  q('.rv-list').hidden = !!id;
  q('.rv-one').hidden = !id || pair.length === 2;
  q('.rv-two').hidden = pair.length !== 2;
  if (pair.length === 2) two.show(pair[0], pair[1]);
  else two.close();
  if (id && pair.length === 1) one.show(id);
  else one.close();
  if (!id) refresh();
}

function key(event) {
  if (!element.isConnected) { document.removeEventListener('keydown', key); return; }
  const typing = event.target.closest('input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]');
  if (typing || event.ctrlKey || event.metaKey || event.altKey || q('.rv-two').hidden || !h3.shown(element)) return;
  two.key(event);
}

options(q('.rv-plan'), [], 'Any plan');
options(q('.rv-state'), Object.entries(STATE_WORDS), 'Any state');
options(q('.rv-kind'), [['generate', 'Videos'], ['parity', 'Parity runs']], 'Any kind');
layout(h3.state('runs.as') || 'grid');

const soon = h3.debounce(200, () => refresh());
q('.rv-filters').addEventListener('input', soon);
q('.rv-filters').addEventListener('submit', (event) => { event.preventDefault(); refresh(); });
q('.rv-filters').addEventListener('reset', () => setTimeout(refresh));
q('.rv-as').addEventListener('click', (event) => { const node = event.target.closest('button'); if (node) layout(node.dataset.as); });
q('.rv-more').addEventListener('click', () => refresh(true));
q('.rv-none').addEventListener('click', () => { chosen = []; choose('', false); });
q('.rv-compare').addEventListener('click', () => h3.go('runs', chosen.join('..')));
for (const node of element.querySelectorAll('.rv-back')) node.addEventListener('click', () => h3.go('runs'));
document.addEventListener('keydown', key);

h3.on('tab', route, element);
h3.on('job', (job) => {
  one.update(job);
  const index = runs.findIndex((r) => r.id === job.id);
  if (index >= 0 && runs[index].state === job.state) return; // how far it is, the list does not tell
  if (h3.shown(element) && !place) soon();
  else stale = true;
}, element);
for (const type of ['queue', 'reset']) h3.on(type, () => { if (h3.shown(element) && !place) soon(); else stale = true; }, element);
h3.every(2000, element, () => { if (stale && !place) { stale = false; refresh(); } });
refresh().then(plans).catch(fail);
route(h3.at());
