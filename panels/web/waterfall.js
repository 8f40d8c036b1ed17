// What the two plots of Timing show: bars of stages over the seconds, and the parts of each step.
const STAGES = ['text encode', 'reference encode', 'denoise', 'video VAE decode', 'audio VAE decode', 'mux', 'latent upsample'];
const ROWS = ['text encode', 'reference encode', 'denoise', 'latent upsample', 'video VAE decode', 'audio VAE decode', 'mux'];
const PARTS = ['attention', 'GEMM', 'communication', 'other'];

// On a phone every name of the legend has a line of its own.
const legendRoom = (names) => (innerWidth < 600 ? 20 * names : 0);
const ranksOf = (stages) => [...new Set(stages.map((s) => s.rank))].sort((a, b) => a - b);
const isBar = (s) => s.stage !== 'load' && s.stage !== 'end to end' && s.stage !== 'all communication' && !PARTS.includes(s.stage);

// What a rank did between its steps is in no bar: from the first to the last end, less the bars.
function gapOf(stages, rank) {
  const mine = stages.filter((s) => s.stage === 'denoise' && s.rank === rank);
  if (mine.length < 2) return 0;
  const begun = Math.min(...mine.map((s) => s.start)), ended = Math.max(...mine.map((s) => s.start + s.seconds));
  return Math.max(0, ended - begun - mine.reduce((sum, s) => sum + s.seconds, 0));
}

function hover(s, gap) {
  const lines = [s.stage + (s.step >= 0 ? ', step ' + (s.step + 1) : '') + ', rank ' + s.rank, exact(s.seconds) + ' from ' + exact(s.start)];
  if (gap) lines.push('between all steps ' + exact(gap) + ' (previews, progress), in no bar');
  if (s.stage === 'mux') lines.push('its own seconds: decoding in between is left out');
  if (s.peak_bytes) lines.push('peak ' + h3.bytes(s.peak_bytes));
  return lines.join('<br>');
}

// {traces, layout}: one colour per stage; rows are stages (and their ranks) or ranks.
function waterfall(stages, by) {
  const bars = stages.filter(isBar), ranks = ranksOf(bars), several = ranks.length > 1;
  const gaps = new Map(ranks.map((r) => [r, gapOf(bars, r)]));
  const names = [...ROWS.filter((n) => bars.some((s) => s.stage === n)), ...new Set(bars.map((s) => s.stage).filter((n) => !ROWS.includes(n)))];
  const label = (s) => (by === 'rank' ? 'rank ' + s.rank : several ? s.stage + ' · ' + s.rank : s.stage);
  const rows = by === 'rank' ? ranks.map((r) => 'rank ' + r)
    : names.flatMap((n) => ranks.filter((r) => bars.some((s) => s.stage === n && s.rank === r)).map((r) => label({ stage: n, rank: r })));
  const traces = names.map((name) => {
    const mine = bars.filter((s) => s.stage === name);
    return {
      type: 'bar', orientation: 'h', name, y: mine.map(label), base: mine.map((s) => s.start), x: mine.map((s) => s.seconds),
      text: mine.map((s) => hover(s, name === 'denoise' ? gaps.get(s.rank) : 0)), hoverinfo: 'text', textposition: 'none', width: by === 'rank' && name === 'mux' ? 0.2 : 0.62, // it spans the decoding
      marker: { color: h3.palette()[Math.max(0, STAGES.indexOf(name))], line: { width: mine.length > 1 && mine.length < 400 ? 1 : 0, color: h3.colour('card') } },
    };
  });
  return {
    traces,
    layout: {
      barmode: 'overlay', height: 64 + 30 * Math.max(rows.length, 2) + (by === 'rank' ? legendRoom(names.length) : 0), showlegend: by === 'rank',
      margin: { l: 8, r: 12, t: by === 'rank' ? 34 : 8, b: 40 },
      yaxis: { type: 'category', categoryorder: 'array', categoryarray: rows, autorange: 'reversed', ticks: '', fixedrange: true },
      xaxis: { title: { text: 'seconds since it began' }, rangemode: 'tozero' },
      uirevision: 'fall ' + by,
    },
  };
}

// Seconds of one name per step, of one rank or of the slowest: step -> seconds.
function perStep(stages, name, rank) {
  const sums = new Map();
  for (const s of stages) {
    if (s.stage !== name || s.step < 0 || (rank !== null && s.rank !== rank)) continue;
    const key = s.step + ' ' + s.rank;
    sums.set(key, (sums.get(key) || 0) + s.seconds);
  }
  const steps = new Map();
  for (const [key, seconds] of sums) {
    const step = Number(key.split(' ')[0]);
    steps.set(step, Math.max(steps.get(step) || 0, seconds));
  }
  return steps;
}

// Of each step the stages of the rank that took longest, so that its parts add up to the step.
function ofSlowest(stages) {
  const slow = new Map();
  for (const s of stages) {
    if (s.stage === 'denoise' && s.seconds > (slow.get(s.step) || { seconds: -1 }).seconds) slow.set(s.step, s);
  }
  return stages.filter((s) => !slow.has(s.step) || slow.get(s.step).rank === s.rank);
}

// A line before each later part of a recipe with several, [8, 3] say, and what each is called.
function partings(parts) {
  const shapes = [], annotations = [];
  let before = 0;
  parts.forEach((steps, i) => {
    if (i) shapes.push({ type: 'line', x0: before + 0.5, x1: before + 0.5, yref: 'paper', y0: 0, y1: 1, line: { color: h3.colour('soft'), width: 1, dash: 'dot' } });
    annotations.push({ x: before + 0.5, y: 1, yref: 'paper', xanchor: 'left', yanchor: 'top', text: ' stage ' + (i + 1), showarrow: false, font: { size: 12, color: h3.colour('soft') } });
    before += steps;
  });
  return { shapes, annotations };
}

// {traces, layout, measured}: stacked parts per step, else the whole step; the base as a line.
// The axis holds all steps that were asked for from the first one on; recipe: steps of each stage.
function stepBars(stages, rank, base, asked, recipe = []) {
  const mine = rank === null ? ofSlowest(stages) : stages;
  const whole = perStep(mine, 'denoise', rank);
  const parts = PARTS.map((name) => [name, perStep(mine, name, rank)]).filter(([, found]) => found.size);
  const shown = parts.length ? parts : [['whole step', whole]];
  const traces = shown.map(([name, found]) => ({
    type: 'bar', name, x: [...found.keys()].map((step) => step + 1), y: [...found.values()],
    marker: { color: h3.palette()[name === 'whole step' ? 2 : PARTS.indexOf(name)] },
    hovertemplate: name + ', step %{x}: %{y:.4f} s<extra></extra>',
  }));
  const before = base ? perStep(base, 'denoise', null) : new Map();
  if (before.size) {
    const steps = [...before.keys()].sort((a, b) => a - b);
    traces.push({
      type: 'scatter', mode: 'lines+markers', name: 'baseline, whole step', x: steps.map((s) => s + 1), y: steps.map((s) => before.get(s)),
      line: { color: h3.colour('ink'), width: 1.5, dash: 'dot', shape: 'hvh' }, marker: { size: 4 }, hovertemplate: 'baseline, step %{x}: %{y:.4f} s<extra></extra>',
    });
  }
  const tallest = Math.max(0, ...whole.values(), ...before.values());
  const room = recipe.length && tallest ? { range: [0, 1.16 * tallest] } : {}; // for the names of its parts
  const last = Math.max(asked || 1, ...[...whole.keys(), ...before.keys()].map((step) => step + 1));
  return {
    traces,
    measured: parts.map(([name]) => name),
    layout: {
      barmode: 'stack', legend: { orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0, traceorder: 'normal', font: { color: h3.colour('soft') } }, height: 270 + legendRoom(traces.length), showlegend: true, bargap: 0.25, margin: { l: 8, r: 12, t: 34, b: 40 },
      xaxis: { title: { text: 'step' }, tickformat: 'd', range: [0.4, last + 0.6], ...(last < 20 ? { dtick: 1 } : {}) },
      yaxis: { title: { text: 'seconds' }, rangemode: 'tozero', ...room }, uirevision: 'steps', ...partings(recipe),
    },
  };
}
