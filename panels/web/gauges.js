// What the plots of Telemetry show: which numbers of a sample, in which unit, as lines of a plot.
const GIB = 1024 ** 3;
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;

// lines: [name, value of a GPU (null: not reported, or not read yet), dash]; told: what the newest values come to.
// group: of a sample's ages, which has none before a first rate; a line holds a number until it is read again.
const GPU_PLOTS = [
  { key: 'util', title: 'Utilisation', unit: '%', digits: 0, range: [0, 102], lines: [['', (g) => g.util, 'solid']], told: ['mean', mean] },
  { key: 'power', title: 'Power', unit: 'W', digits: 0, lines: [['', (g) => g.power, 'solid']], limitName: 'limit', limit: (g) => g.power_limit, told: ['total', sum] },
  { key: 'memory', title: 'Memory', unit: 'GiB', digits: 1, scale: 1 / GIB, lines: [['', (g) => g.mem_used, 'solid']], limitName: 'of', limit: (g) => g.mem_total, told: ['total', sum] },
  { key: 'temp', title: 'Temperature', unit: '°C', digits: 0, lines: [['', (g) => g.temp, 'solid'], ['memory', (g) => g.mem_temp, 'dot']], told: ['hottest', (v) => Math.max(...v)] },
  { key: 'clock', title: 'Clocks', unit: 'MHz', digits: 0, lines: [['', (g) => g.sm_clock, 'solid'], ['memory', (g) => g.mem_clock, 'dot']], told: ['slowest SM', (v) => Math.min(...v)] },
  { key: 'nvlink', group: 'nvlink', title: 'NVLink', unit: 'GB/s', digits: 1, scale: 1e-9, total: true, lines: [['sent', (g) => g.nvlink_tx, 'solid'], ['received', (g) => minus(g.nvlink_rx), 'solid']], told: ['sent', sum] },
  { key: 'pcie', group: 'pcie', title: 'PCIe', unit: 'GB/s', digits: 1, scale: 1e-9, total: true, lines: [['sent', (g) => g.pcie_tx, 'solid'], ['received', (g) => minus(g.pcie_rx), 'solid']], told: ['sent', sum] },
];
const HOST_PLOTS = [
  { key: 'cpu', title: 'Host CPU', unit: '%', digits: 0, range: [0, 102], host: (s) => s.cpu },
  { key: 'ram', title: 'Host RAM', unit: 'GiB', digits: 1, scale: 1 / GIB, host: (s) => s.ram_used, limitName: 'of', hostLimit: (s) => s.ram_total },
];
const minus = (x) => (x === null ? null : -x);

// Plotly's date axis knows UTC only; shifted so that it reads as the clock on the wall.
const clock = (t) => (t - new Date(t * 1000).getTimezoneOffset() * 60) * 1000;

// Whether this GPU was asked for the plot's numbers, so that null says "not reported".
const known = (plot, g) => g.lost || !plot.group || g.ages[plot.group] !== undefined;

// One sample per bucket, the last of it, and a gap (null) where samples are missing.
function thin(samples, from, to, most) {
  const bucket = (to - from) / most, kept = [];
  let before = null, slot = null;
  for (const s of samples) {
    if (s.t < from - bucket || s.t > to + bucket) continue;
    if (before && s.t - before > Math.max(4, 3 * bucket)) { kept.push(null); slot = null; }
    const mine = Math.floor(s.t / bucket);
    if (mine === slot) kept[kept.length - 1] = s; else kept.push(s);
    slot = mine;
    before = s.t;
  }
  return kept;
}

function series(kept, value, scale) {
  return kept.map((s) => {
    const x = s && value(s);
    return x === null || x === undefined ? null : x * scale;
  });
}

const times = (kept) => kept.map((s, i) => (s ? clock(s.t) : clock(kept[i - 1].t) + 1));

function line(name, x, y, colour, dash, plot) {
  const size = '.' + plot.digits + 'f';
  return {
    type: 'scatter', mode: 'lines', name, x, y, customdata: y.map((v) => (v === null ? null : Math.abs(v))), line: { color: colour, dash, width: dash === 'dot' ? 1.1 : 1.6 },
    hovertemplate: '%{customdata:' + size + '} ' + plot.unit + '<extra>%{fullData.name}</extra>', connectgaps: false,
  };
}

// {traces, silent: [GPU numbers without a report], newest: [values now]} of one plot.
function gpuTraces(plot, kept, names, colours, shown) {
  const traces = [], silent = [], x = times(kept), scale = plot.scale || 1;
  const sums = plot.lines.map(() => kept.map(() => null));
  names.forEach((name, place) => {
    let told = false;
    plot.lines.forEach(([part, value, dash], k) => {
      const y = series(kept, (s) => (s.gpus[place] ? value(s.gpus[place]) : null), scale);
      if (!y.some((v) => v !== null)) return;
      told = told || k === 0 || plot.total;
      y.forEach((v, i) => { if (v !== null) sums[k][i] = (sums[k][i] || 0) + v; });
      if (shown(place)) traces.push(line(part ? name + ' ' + part : name, x, y, colours[place % colours.length], dash, plot));
    });
    if (!told && kept.some((s) => s && s.gpus[place] && known(plot, s.gpus[place]))) silent.push(place);
  });
  if (plot.total && sums[0].some((v) => v !== null) && names.length - silent.length > 1) {
    plot.lines.forEach(([part], k) => traces.push(line('all ' + part, x, sums[k], h3.colour('ink'), 'solid', plot)));
  }
  const latest = kept.length ? kept[kept.length - 1] : null;
  const now = latest ? latest.gpus.map((g) => plot.lines[0][1](g)).filter((v) => v !== null).map((v) => v * scale) : [];
  return { traces, silent, now };
}

// The limit as a dashed line, where all GPUs that report have the same one.
function limitLine(plot, kept) {
  const latest = kept.length ? kept[kept.length - 1] : null;
  if (!latest || !(plot.limit || plot.hostLimit)) return null;
  const values = plot.hostLimit ? [plot.hostLimit(latest)] : latest.gpus.map(plot.limit).filter((v) => v !== null);
  return values.length && values.every((v) => v === values[0]) ? values[0] * (plot.scale || 1) : null;
}

function markLines(marks, from, to) {
  return marks.filter((m) => m.t >= from && m.t <= to).map((m) => ({
    type: 'line', xref: 'x', yref: 'paper', x0: clock(m.t), x1: clock(m.t), y0: 0, y1: 1, layer: 'below',
    line: { color: h3.colour(m.kind === 'run' ? 'accent' : 'soft'), width: m.kind === 'run' ? 1.4 : 0.8, dash: m.kind === 'run' ? 'solid' : 'dot' },
  }));
}

// view: {from, to, marks, wide, revision, gpus: how many}. The range along x is the view's; a zoom of a person stays.
function shape(plot, view, limit, traces) {
  const shapes = [...markLines(view.marks, view.from, view.to), ...bands(view)];
  const annotations = [];
  if (plot.total) {
    annotations.push(...[['sent', 1, 'top'], ['received', 0, 'bottom']].map(([text, y, yanchor]) => ({
      xref: 'paper', yref: 'paper', x: 0.004, y, xanchor: 'left', yanchor, text, showarrow: false, font: { size: 11, color: h3.colour('soft') },
    })));
  }
  if (limit !== null) {
    shapes.push({ type: 'line', xref: 'paper', yref: 'y', x0: 0, x1: 1, y0: limit, y1: limit, line: { color: h3.colour('soft'), width: 1, dash: 'dash' } });
    const each = view.gpus > 1 && !plot.host ? ' per GPU' : '';
    annotations.push({ xref: 'paper', yref: 'y', x: 1, y: limit, xanchor: 'right', yanchor: 'bottom', text: plot.limitName + ' ' + limit.toFixed(0) + ' ' + plot.unit + each, showarrow: false, font: { size: 11, color: h3.colour('soft') } });
  }
  return {
    height: 196, showlegend: false, uirevision: view.revision, shapes, annotations,
    margin: { l: 44, r: 6, t: 10, b: 26 }, hovermode: view.wide ? 'x unified' : 'closest', dragmode: view.touch ? false : 'zoom',
    xaxis: { type: 'date', range: [clock(view.from), clock(view.to)], tickformat: view.to - view.from > 400 ? '%H:%M' : '%H:%M:%S', hoverformat: '%H:%M:%S', nticks: view.wide ? 7 : 4, showgrid: false, automargin: false },
    yaxis: { fixedrange: true, automargin: false, nticks: 5, zeroline: Boolean(plot.total), ...yRange(plot, limit, traces) },
  };
}

function yRange(plot, limit, traces) {
  if (plot.range) return { range: plot.range };
  if (limit !== null) return { range: [0, limit * 1.16] };
  if (!plot.total) return { rangemode: 'tozero' };
  const most = traces.flatMap((t) => t.y).reduce((a, v) => Math.max(a, Math.abs(v || 0)), 0.01);
  const ten = 10 ** Math.floor(Math.log10(most));
  const step = [1, 2, 5, 10].map((k) => k * ten).find((k) => most <= k);
  const ticks = [-step, -step / 2, 0, step / 2, step];
  return { range: [-step * 1.12, step * 1.12], tickvals: ticks, ticktext: ticks.map((v) => String(Number(Math.abs(v).toPrecision(3)))) };
}

// The stages once more at the top of each plot, on its own time axis.
function bands(view) {
  const colours = h3.palette();
  return stageBars(view.marks, view).filter((b) => b.to - b.from > (view.to - view.from) / 500).map((b) => ({
    type: 'rect', xref: 'x', yref: 'paper', x0: clock(Math.max(b.from, view.from)), x1: clock(Math.min(b.to, view.to)), y0: 0.975, y1: 1,
    layer: 'below', line: { width: 0 }, fillcolor: laneColour(b.name, colours), opacity: 0.85,
  }));
}

// What the lines of a plot mean beyond the colour of a GPU: [kind of line, words].
function lineKey(plot, gpus) {
  const dotted = plot.host ? undefined : plot.lines.find(([, , dash]) => dash === 'dot');
  return [...(dotted ? [['dotted', dotted[0]]] : []), ...(plot.total && gpus > 1 ? [['ink', 'all GPUs']] : [])];
}

const LANE = ['text encode', 'reference encode', 'denoise', 'video VAE decode', 'audio VAE decode', 'mux']; // colours as in Timing

const laneColour = (name, colours) => colours[(LANE.indexOf(name) + 8) % 8];

// The stages that touch the view: {name, from, to, id}, each until the next mark.
function stageBars(marks, view) {
  const bars = [];
  marks.forEach((m, i) => {
    if (m.kind !== 'stage') return;
    const next = marks[i + 1];
    const end = next ? next.t : view.to;
    if (end >= view.from && m.t <= view.to) bars.push({ name: m.mark, from: m.t, to: end, id: m.id });
  });
  return bars;
}

// Bars of the stages between the marks of the runs; null where nothing ran.
function lane(marks, view) {
  const bars = stageBars(marks, view);
  if (!bars.length) return null;
  const names = [...new Set(bars.map((b) => b.name))], colours = h3.palette();
  const traces = names.map((name) => {
    const mine = bars.filter((b) => b.name === name);
    return {
      type: 'bar', orientation: 'h', name, y: mine.map(() => 'stage'), base: mine.map((b) => clock(b.from)), x: mine.map((b) => (b.to - b.from) * 1000),
      text: mine.map(() => name), textposition: 'inside', insidetextanchor: 'middle', constraintext: 'inside', textangle: 0, insidetextfont: { color: h3.colour('card'), size: 11 },
      hoverinfo: 'text', hovertext: mine.map((b) => name + '<br>' + h3.seconds(b.to - b.from)), marker: { color: laneColour(name, colours) }, width: 1,
    };
  });
  const layout = shape({}, view, null, []);
  return {
    traces,
    layout: { ...layout, height: 30, barmode: 'overlay', hovermode: 'closest', margin: { l: 55, r: 17, t: 2, b: 2 }, plot_bgcolor: 'rgba(128,128,128,0.1)', shapes: [], annotations: [],
      xaxis: { ...layout.xaxis, visible: false }, yaxis: { visible: false, fixedrange: true }, uniformtext: { mode: 'hide', minsize: 10 } },
  };
}
