// Layouts and benchmarks: what `launch.py sweep` and `bench` measured, a subject a row.
const q = (s) => element.querySelector(s);
let listed = [], chosen = '', followed = true, shownOne = null, asked = 0;

function fail(error) {
  h3.write(q('.ms-alert'), error ? error.message : '');
  q('.ms-alert').hidden = !error;
}

const short = (names) => (names.length > 4 ? names.slice(0, 3).join(', ') + ' and ' + (names.length - 3) + ' more' : names.join(', '));

function title(m) {
  const about = m.kind === 'sweep' ? m.plan + ': ' + short(m.subjects) : short(m.subjects);
  return [h3.when(Date.parse(m.when) / 1000), m.kind, about, m.device, m.source === 'bench' ? '' : m.source].filter(Boolean).join(' · ');
}

function options() {
  q('.ms-one').replaceChildren(...listed.map((m) => {
    const option = h3.make('option', '', title(m));
    option.value = m.id;
    return option;
  }));
  q('.ms-one').value = chosen;
}

async function refresh() {
  const mine = ++asked;
  try {
    const found = (await h3.api('/measurements')).measurements;
    if (mine !== asked) return;
    fail(null);
    const known = listed.map((m) => m.id).join(), now = found.map((m) => m.id).join();
    listed = found;
    if (followed || !listed.some((m) => m.id === chosen)) chosen = listed.length ? listed[0].id : '';
    if (known !== now) options();
    if (!shownOne || shownOne.id !== chosen) shownOne = chosen ? await h3.api('/measurements/' + encodeURIComponent(chosen)) : null;
    else if (known === now && q('.ms').dataset.one === chosen) return;
    if (mine === asked) draw();
  } catch (error) { fail(error); }
}

const good = (m) => m.subjects.filter((s) => s.ok);
const share = (x) => (x === null || x === undefined ? null : (100 * x).toFixed(1) + ' %');
const soft = (text) => (text === null ? ['–', 'soft'] : [text, '']);

// {traces, layout}: the parts of a step stacked per subject, its least and most, and the efficiency.
function plotOf(m) {
  const rows = good(m), x = rows.map((s) => s.name);
  const parts = PARTS.filter((name) => rows.every((s) => s.parts[name]));
  const traces = (parts.length ? parts : ['whole step']).map((name) => ({
    type: 'bar', name: name === 'communication' ? 'waiting for other ranks' : name, x,
    y: rows.map((s) => (parts.length ? s.parts[name] : s.step_seconds).median),
    marker: { color: h3.palette()[parts.length ? PARTS.indexOf(name) : 2] }, hovertemplate: name + ', %{x}: %{y:.4f} s<extra></extra>',
  }));
  const steps = rows.map((s) => s.step_seconds);
  traces.push({
    type: 'scatter', mode: 'markers', name: 'step, least to most', x, y: steps.map((s) => s.median), marker: { size: 7, symbol: 'line-ew', color: h3.colour('ink'), line: { width: 2, color: h3.colour('ink') } },
    error_y: { type: 'data', symmetric: false, array: steps.map((s) => s.max - s.median), arrayminus: steps.map((s) => s.median - s.min), color: h3.colour('ink'), thickness: 1.4 },
    hovertemplate: 'step of %{x}: %{y:.4f} s<extra></extra>',
  });
  const efficient = rows.some((s) => s.efficiency !== null);
  if (efficient) {
    traces.push({
      type: 'scatter', mode: 'lines+markers', name: 'scaling efficiency', x, y: rows.map((s) => (s.efficiency === null ? null : 100 * s.efficiency)), yaxis: 'y2',
      line: { color: h3.palette()[4], width: 1.5, dash: 'dot' }, marker: { size: 6 }, hovertemplate: 'efficiency of %{x}: %{y:.1f} %<extra></extra>',
    });
  }
  return {
    traces,
    layout: {
      barmode: 'stack', legend: { orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0, traceorder: 'normal', font: { color: h3.colour('soft') } }, height: 290 + legendRoom(traces.length), showlegend: true, bargap: rows.length < 3 ? 0.62 : 0.35, margin: { l: 8, r: 12, t: 34, b: 40 }, uirevision: m.id,
      xaxis: { type: 'category' }, yaxis: { title: { text: 'seconds per step' }, rangemode: 'tozero' },
      ...(efficient ? { yaxis2: { title: { text: 'efficiency, %' }, overlaying: 'y', side: 'right', range: [0, 115], showgrid: false, tickmode: 'linear', tick0: 0, dtick: 25 } } : {}),
    },
  };
}

function parityText(parity) {
  if (!parity) return null;
  const figure = (one) => (one.equal ? 'equal' : one.relative_l2 === null ? 'not finite' : one.relative_l2.toExponential(2));
  return figure(parity.video) + ' / ' + figure(parity.audio);
}

// Seconds and share of a step; total communication overlaps with computation, so it may exceed the exposed one.
function communication(seconds, part, step) {
  if (seconds === null || seconds === undefined) return part === null || part === undefined ? null : share(part);
  return exact(seconds) + ', ' + share(part === null || part === undefined ? seconds / step : part);
}

function cells(s) {
  const step = s.step_seconds;
  return [
    [exact(step.median), ''],
    soft(s.speedup === null ? null : s.speedup.toFixed(2) + 'x'),
    soft(share(s.efficiency)),
    soft(communication(s.exposed_communication_seconds, s.exposed_communication_share, step.median)),
    soft(s.imbalance_seconds === null ? null : exact(s.imbalance_seconds)),
    soft(communication(s.communication_seconds, s.communication_share, step.median)),
    [s.rank_peak_bytes.map((x) => h3.bytes(x)).join(' · '), 'many'],
    soft(parityText(s.parity)),
  ];
}

function table(m) {
  const head = ['', 'step', 'speed-up', 'efficiency', 'exposed comm.', 'imbalance', 'total comm.', 'peak memory per rank', 'parity video / audio'];
  q('.ms-table thead').replaceChildren(tableHead(head));
  q('.ms-table tbody').replaceChildren(...m.subjects.map((s) => {
    if (s.ok) return tableRow(s.name, cells(s));
    const row = tableRow(s.name, [['failed: ' + s.reason, 'worse wrap']]);
    row.lastChild.colSpan = head.length - 1;
    return row;
  }));
  const n = good(m).length ? good(m)[0].step_seconds.n : 0;
  h3.write(q('.ms-note'), (n ? 'Medians of ' + plural(n, 'step') + ', order ' + m.order + '. ' : '')
    + (m.kind === 'sweep' ? 'Speed-up, efficiency and parity (relative L2 of the final latents) are against single. ' : '')
    + 'Exposed communication is what computing did not hide; total is all that was under way between ranks. '
    + 'Imbalance is what a rank waits beyond that, for a slower one.'
    + m.gpus.map((of) => ' Alone, GPU ' + of.gpu + (of.ok ? ' takes ' + exact(of.step_seconds.median) + ' a step.' : ' failed: ' + of.reason + '.')).join(''));
}

function conditions(m) {
  const rows = Object.entries(m.machine).filter(([, value]) => value);
  const resolved = good(m).map((s) => [s.name, s.resolved]), known = new Set(Object.keys(m.machine));
  for (const name of new Set(resolved.flatMap(([, r]) => Object.keys(r)))) {
    if (known.has(name)) continue;
    const values = resolved.map(([who, r]) => [who, r[name] ?? '–']);
    const same = values.every(([, value]) => value === values[0][1]);
    rows.push([name, same ? values[0][1] : values.map(([who, value]) => who + ': ' + value).join('; ')]);
  }
  q('.ms-conditions').replaceChildren(...rows.flatMap(([name, value]) => [h3.make('dt', '', name), h3.make('dd', '', String(value))]));
}

async function draw() {
  const m = shownOne;
  q('.ms-empty').hidden = !!m;
  q('.ms-body').hidden = q('.tools').hidden = q('.tm-pick').hidden = !m;
  q('.ms').dataset.one = m ? m.id : '';
  if (!m) return;
  q('.ms-json').href = '/api/v1/measurements/' + encodeURIComponent(m.id);
  q('.ms-json').download = m.id + '.json';
  const words = ['plan ' + m.plan, m.device, ...shapeWords(m.shape), m.rows ? m.rows.toLocaleString('en') + ' packed rows' : '', m.text_rows ? 'random words: ' + m.text_rows : '', m.weights ? 'random weights: ' + m.weights : ''];
  q('.ms-shape').replaceChildren(...chips(words.filter(Boolean)));
  q('.ms-ratio').hidden = !m.ratios.length;
  h3.write(q('.ms-ratio'), m.ratios.map((r) => 'A step of ' + (r.of ? r.of + ' of ' : '') + r.second + ' takes ' + r.step.toFixed(3) + ' times as long as one of ' + r.first + ' (' + r.rounds.min.toFixed(3) + ' to ' + r.rounds.max.toFixed(3) + ' in ' + plural(r.rounds.n, 'round') + ').').join(' '));
  conditions(m);
  table(m);
  q('.ms-steps').parentElement.hidden = !good(m).length;
  if (!good(m).length) return;
  const { traces, layout } = plotOf(m);
  try { await h3.plot(q('.ms-steps'), traces, layout); } catch (error) { fail(error); }
}

q('.ms-one').addEventListener('change', () => {
  chosen = q('.ms-one').value;
  followed = listed.length > 0 && chosen === listed[0].id;
  refresh();
});
h3.on('theme', () => { if (shownOne) draw(); }, element);
h3.on('tab', ({ tab }) => { if (tab === 'timing') refresh(); }, element);
h3.every(10000, element, refresh);
refresh();
