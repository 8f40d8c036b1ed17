// Telemetry: tiles that are the legend, plots that are drawn while they can be seen, links, topology.
const q = (s) => element.querySelector(s);
const store = readings(() => { dirty = true; });
const REDRAW = { 120: 1000, 600: 2000, 1800: 5000 }; // window in seconds: milliseconds between drawings
const hidden = new Set(); // UUIDs whose lines a person has switched off
let dirty = false, span = h3.state('telemetry.window') || 120, zoom = null, revision = 0, drawnAt = 0, took = 0, tiles = [], cards = [], built = null;

const label = (gpu, place, all) => (gpu.cuda === null ? 'NVML ' + gpu.nvml_index : 'GPU ' + gpu.cuda);
const names = () => store.held.info.gpus.map(label);
const latest = () => store.held.samples[store.held.samples.length - 1];

// ---- building, once per set of GPUs

function build() {
  const { info } = store.held;
  const key = info.gpus.map((g) => g.uuid).join() + info.reason;
  if (key === built) return;
  built = key;
  q('.tl-none').hidden = !info.reason;
  h3.write(q('.tl-none'), info.reason ? 'No GPU to watch: ' + info.reason + '. The plots below show the host.' : '');
  tiles = info.gpus.map(tile);
  q('.tl-tiles').replaceChildren(...tiles.map((t) => t.node));
  q('.tl-tiles').hidden = !tiles.length;
  for (const card of cards) { seen.unobserve(card.node); h3.unplot(card.div); }
  cards = [...(tiles.length ? GPU_PLOTS : []), ...HOST_PLOTS].map(cardOf);
  q('.tl-plots').replaceChildren(...cards.map((c) => c.node));
  topology(info);
  q('.tl-linksbox').hidden = !info.gpus.some((g) => g.nvlinks);
  links();
}

function tile(gpu, place) {
  const make = h3.make, head = make('span', 'tl-head');
  const parts = { state: make('span', 'pill tl-state'), util: make('span', 'tl-big'), rest: make('span', 'tl-rest'), clock: make('span', 'tl-rest tl-clock'), fill: make('span', 'tl-fill'), memory: make('span', 'tl-memory') };
  head.append(make('span', 'tl-dot'), make('span', 'tl-name', label(gpu)), parts.state);
  const node = h3.button('tl-tile', '', '', () => {
    if (hidden.has(gpu.uuid)) hidden.delete(gpu.uuid); else hidden.add(gpu.uuid);
    node.setAttribute('aria-pressed', !hidden.has(gpu.uuid));
    draw();
  });
  node.setAttribute('aria-pressed', !hidden.has(gpu.uuid));
  node.title = [gpu.name, gpu.uuid, 'bus ' + gpu.bus, gpu.compute && 'compute ' + gpu.compute, gpu.pcie, gpu.nvlinks && gpu.nvlinks + ' NVLinks', gpu.mig && 'MIG is on', gpu.cuda === null && 'not numbered by CUDA here'].filter(Boolean).join(' · ');
  node.append(head, make('span', 'tl-numbers', '', parts.util, parts.rest, parts.clock), make('span', 'tl-bar', '', parts.fill), parts.memory);
  node.style.setProperty('--tl-colour', 'var(--h3-plot-' + (place % 8 + 1) + ')');
  return { node, parts, gpu };
}

function lineWords([kind, words]) {
  const sample = h3.make('i', 'tl-sample');
  sample.dataset.kind = kind;
  return h3.make('span', 'tl-unit', '', sample, words);
}

function cardOf(plot) {
  const div = h3.make('div', 'tl-plot'), told = h3.make('span', 'tl-told'), note = h3.make('p', 'tl-silent');
  const title = h3.make('h3', 'tl-title', plot.title, h3.make('span', 'tl-unit', plot.unit), ...lineKey(plot, tiles.length).map(lineWords));
  div.setAttribute('role', 'img');
  div.setAttribute('aria-label', plot.title + ' over time in ' + plot.unit);
  const node = h3.make('div', 'tl-card', '', h3.make('div', 'tl-cardtop', '', title, told), div, note);
  const card = { plot, node, div, told, note, visible: false, wired: false };
  node.card = card;
  seen.observe(node);
  return card;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const card = entry.target.card;
    card.visible = entry.isIntersecting;
    if (card.visible && latest()) Promise.resolve(drawCard(card)).catch((error) => fail(error.message));
  }
}, { rootMargin: '120px' });

// ---- drawing

function view() {
  const end = latest().t;
  const [from, to] = zoom || [end - span, end];
  return { from, to, marks: store.held.marks, wide: element.clientWidth > 700, touch: matchMedia('(pointer: coarse)').matches, revision, gpus: tiles.length };
}

function drawCard(card) {
  const { plot } = card, now = view(), kept = thin(store.held.samples, now.from, now.to, 300), limit = limitLine(plot, kept);
  let traces, silent = [], values;
  if (plot.host) {
    const y = series(kept, plot.host, plot.scale || 1);
    traces = [line(plot.title, times(kept), y, h3.colour('accent'), 'solid', plot)];
    values = y.slice(-1);
    h3.write(card.told, values.length ? values[0].toFixed(plot.digits) + ' ' + plot.unit : '');
  } else {
    const found = gpuTraces(plot, kept, names(), h3.palette(), (place) => !hidden.has(store.held.info.gpus[place].uuid));
    ({ traces, silent } = found);
    h3.write(card.told, found.now.length ? (found.now.length > 1 ? plot.told[0] + ' ' : '') + plot.told[1](found.now).toFixed(plot.digits) + ' ' + plot.unit : '');
  }
  h3.write(card.note, silent.length ? 'Not reported by ' + silent.map((place) => names()[place]).join(', ') : '');
  card.note.hidden = !card.note.textContent;
  return h3.plot(card.div, traces, shape(plot, now, limit, traces)).then(() => wire(card));
}

// A number that no GPU reports has no plot, and one line says so.
function missing() {
  const { samples } = store.held, shared = latest().gpus.some((g) => g.unified);
  const told = (plot) => plot.host || latest().gpus.some((g) => !known(plot, g)) || samples.some((s) => s.gpus.some((g) => plot.lines.some(([, value]) => value(g) !== null)));
  for (const card of cards) card.node.hidden = !told(card.plot);
  const gone = cards.filter((c) => c.node.hidden).map((c) => c.plot.title + (c.plot.key === 'pcie' && shared ? ' (CPU and GPU share one memory)' : ''));
  h3.write(q('.tl-missing'), gone.length ? 'Not reported here: ' + gone.join(', ') + '.' : '');
  q('.tl-missing').hidden = !gone.length;
}

// A range dragged in one plot holds for all; a double click goes back to the newest.
function wire(card) {
  if (card.wired) return;
  card.wired = true;
  let left = 0;
  card.div.on('plotly_relayout', (change) => {
    const from = change['xaxis.range[0]'], to = change['xaxis.range[1]'];
    if (from === undefined || Date.now() - left < 300) return;
    zoom = [epoch(from), epoch(to)];
    draw();
  });
  card.div.on('plotly_doubleclick', () => { left = Date.now(); live(); return false; });
}

function epoch(text) {
  const shifted = typeof text === 'number' ? text : Date.parse(text.replace(' ', 'T') + 'Z');
  return shifted / 1000 + new Date(shifted).getTimezoneOffset() * 60;
}

function live() {
  zoom = null;
  revision += 1; // what plotly remembers of the zoom is void
  draw();
}

function drawTiles() {
  const now = latest();
  tiles.forEach(({ node, parts }, place) => {
    const g = now.gpus[place];
    if (!g) return;
    const state = g.lost ? 'lost' : (g.throttle || []).join(', ');
    node.dataset.lost = g.lost;
    parts.state.dataset.verdict = g.lost ? 'no' : 'tight';
    parts.state.hidden = !state;
    h3.write(parts.state, state);
    h3.write(parts.util, g.lost ? 'no answer' : g.util === null ? '–' : g.util + ' %');
    h3.write(parts.rest, g.lost ? '' : [g.power !== null && Math.round(g.power) + ' W', g.temp !== null && g.temp + ' °C'].filter(Boolean).join(' · '));
    h3.write(parts.clock, g.sm_clock === null ? '' : g.sm_clock + ' MHz');
    parts.fill.style.width = g.mem_total ? (100 * g.mem_used / g.mem_total) + '%' : '0';
    const used = g.mem_total === null ? 'memory not reported' : (g.mem_used / GIB).toFixed(1) + ' of ' + (g.mem_total / GIB).toFixed(0) + ' GiB' + (g.unified ? ', shared with the CPU' : '');
    h3.write(parts.memory, g.lost ? 'looked for every 20 s' : used);
  });
  const lost = tiles.filter((t, place) => now.gpus[place] && now.gpus[place].lost).map((t) => label(t.gpu));
  h3.write(q('.tl-lost'), lost.length ? lost.join(', ') + (lost.length > 1 ? ' do' : ' does') + ' not answer any more; the others go on. A reset of the GPU or of the machine brings it back.' : '');
  q('.tl-lost').hidden = !lost.length;
}

function drawLane() {
  const now = view(), found = lane(store.held.marks, now);
  q('.tl-lane').hidden = !found;
  q('.tl-key').hidden = !now.marks.some((m) => m.t >= now.from && m.t <= now.to);
  return found && h3.plot(q('.tl-stages'), found.traces, found.layout);
}

function drawHead() {
  const { info, hz } = store.held, kinds = [...new Set(info.gpus.map((g) => g.name))];
  const count = (name) => info.gpus.filter((g) => g.name === name).length;
  h3.write(q('.tl-what'), kinds.map((name) => (count(name) > 1 ? count(name) + ' × ' : '') + name).join(', ') || 'Host');
  h3.write(q('.tl-driver'), [info.driver && 'driver ' + info.driver, info.cuda && 'CUDA ' + info.cuda, info.cpus + ' CPU cores', hz + (hz === 1 ? ' sample' : ' samples') + ' a second'].filter(Boolean).join(' · '));
  q('.tl-fast').setAttribute('aria-pressed', hz > 1);
  q('.tl-live').hidden = !zoom;
}

function draw() {
  fail(store.held.error);
  if (!store.held.info) return;
  build();
  drawHead();
  if (!latest()) return;
  dirty = false;
  drawnAt = Date.now();
  const begun = performance.now();
  drawTiles();
  missing();
  Promise.all([drawLane(), ...cards.filter((c) => c.visible && !c.node.hidden).map(drawCard)])
    .catch((error) => fail(error.message))
    .finally(() => { took = performance.now() - begun; });
}

function fail(text) {
  h3.write(q('.tl-alert'), text);
  q('.tl-alert').hidden = !text;
}

// ---- each NVLink, and who is joined how

let rows = []; // of cells, one row per GPU
async function links() {
  if (!q('.tl-linksbox').open || q('.tl-linksbox').hidden || !h3.shown(element)) return;
  let answer;
  try { answer = await h3.api('/telemetry/links'); } catch (error) { fail(error.message); return; }
  const rates = answer.gpus.map((all) => all.map((pair) => pair.map((x) => x || 0)));
  if (!rates.flat().length) { h3.write(q('.tl-scale'), 'The links are being read.'); return; }
  if (rates.map((r) => r.length).join() !== rows.map((r) => r.length).join()) {
    rows = rates.map((all) => all.map(() => h3.make('span', 'tl-link')));
    q('.tl-links').replaceChildren(...rows.flatMap((cells, place) => [h3.make('span', 'tl-linkname', names()[place]), h3.make('span', 'tl-linkrow', '', ...cells)]));
  }
  const most = Math.max(1e9, ...rates.flat(2));
  h3.write(q('.tl-scale'), 'A full colour is ' + (most / 1e9).toFixed(1) + ' GB/s in one direction. Read every ten seconds while this is open, which takes up to 5 % of a core.');
  rates.forEach((all, place) => all.forEach(([sent, got], link) => {
    const cell = rows[place][link];
    cell.style.setProperty('--tl-heat', Math.round(100 * Math.max(sent, got) / most) + '%');
    cell.title = names()[place] + ', link ' + link + ': ' + (sent / 1e9).toFixed(2) + ' GB/s sent, ' + (got / 1e9).toFixed(2) + ' GB/s received';
  }));
}

function topology(info) {
  q('.tl-topobox').hidden = info.topology.length < 2;
  const kinds = new Set();
  const head = h3.make('tr', '', '', h3.make('td'), ...info.gpus.map((g) => h3.make('th', '', label(g))));
  const rows = info.topology.map((row, a) => h3.make('tr', '', '', h3.make('th', '', label(info.gpus[a])), ...row.map((way) => {
    kinds.add(way.kind);
    const cell = h3.make('td', '', way.kind);
    cell.dataset.kind = way.kind.replace(/\d+/, '');
    if (way.peer !== null) cell.title = way.peer ? 'reads the other’s memory directly' : 'no direct access to the other’s memory';
    return cell;
  })));
  q('.tl-topo').replaceChildren(head, ...rows);
  const meaning = (k) => (/^NV\d/.test(k) ? k.slice(2) + ' NVLinks' : info.legend[k]);
  const words = [...kinds].filter((k) => k !== 'X').map((k) => k + ': ' + meaning(k));
  h3.write(q('.tl-legend'), words.join(' · '));
}

// ---- wiring

for (const button of element.querySelectorAll('.tl-window button')) {
  const mine = Number(button.dataset.seconds);
  button.addEventListener('click', () => {
    span = mine;
    zoom = null;
    revision += 1;
    h3.state('telemetry.window', span);
    press();
    store.show(span);
  });
}
function press() {
  for (const button of element.querySelectorAll('.tl-window button')) button.setAttribute('aria-pressed', Number(button.dataset.seconds) === span);
}
q('.tl-live').addEventListener('click', live);
q('.tl-fast').addEventListener('click', async () => {
  try {
    await h3.api('/telemetry/rate', { method: 'POST', body: { hz: store.held.hz > 1 ? 1 : 10, seconds: 60 } });
    store.rest();
  } catch (error) { fail(error.message); }
});
q('.tl-linksbox').addEventListener('toggle', links);
h3.every(5000, element, links);

h3.on('telemetry', (s) => { if (h3.shown(element)) store.sample(s); }, element);
h3.on('mark', (m) => { if (h3.shown(element)) store.mark(m); }, element);
h3.on('reset', () => { if (h3.shown(element)) store.whole(); }, element);
// Runs only while the panel can be seen: what was missed meanwhile is fetched in one go.
h3.every(250, element, () => {
  if (store.held.samples.length && h3.now() - store.last() > 4 && Date.now() - asked > 4000) { asked = Date.now(); store.rest(); }
  if (dirty && Date.now() - drawnAt >= Math.max(drawnAt ? REDRAW[span] : 0, 4 * took)) draw(); // a slow machine draws less often
});
let asked = 0;
if (!REDRAW[span]) span = 120;
press();
store.show(span);
