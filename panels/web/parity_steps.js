// One case: where it diverges first, curves per step for video and audio, and the tables.
// People count steps and frames from 1; the names of tensors and files count them from 0.
const METRICS = {
  relative_l2: ['relative L2', 'Distance over the length of the golden; this is what the gates are on.'],
  max_abs: ['largest difference', 'Largest absolute difference of one value.'],
  mean_abs: ['mean difference', 'Mean absolute difference.'],
  cosine: ['1 − cosine', 'One minus the cosine of the angle between both: 0 is the same direction.'],
  psnr: ['PSNR, dB', 'Peak signal to noise; the peak is the golden’s value range. Higher is closer.'],
};

function figure(x) {
  if (x === null || x === undefined) return '–';
  if (x === 0) return '0';
  return Math.abs(x) >= 0.01 && Math.abs(x) < 1000 ? x.toPrecision(3) : x.toExponential(2);
}

const cosine = (x) => (x === null ? '–' : x === 1 ? '1' : x > 0.999 ? '1 − ' + (1 - x).toExponential(1) : x.toFixed(5));
const psnr = (x) => (x === null ? '–' : x.toFixed(1) + ' dB');
const ORDER = ['x', 'velocity', 'velocity (negative)', 'denoised (positive)', 'denoised (negative)', 'denoised']; // as computed
const byStep = (a, b) => a.step - b.step || ORDER.indexOf(a.quantity) - ORDER.indexOf(b.quantity);
const gateOf = (d) => (d.limit ? d.limit + (d.limit_relative_l2 ? ' ' + d.limit_relative_l2.toExponential(1) : '') : 'not gated');

const PLOTTED = /^(x|denoised|velocity)/;

// A golden of LTX holds the same steps in several forms of the computation: "model_pre_a2v.step.0.x.video".
const formOf = (d) => (/^(.+?)\.step\.\d+\./.exec(d.name || '') || ['', ''])[1];

// The golden's file: copies of one case differ by it.
const nameOf = (result) => (result.golden || result.case).replace(/^checkout(\+ltx)?\//, '');

function caseView(root) {
  const find = (css) => root.querySelector(css);
  let details = [], run = 'free', metric = 'relative_l2', part = 'video', form = '';

  const ofRun = () => details.filter((d) => d.run === run);
  const stepped = (d) => d.step !== null && PLOTTED.test(d.quantity);
  const steps = (which) => ofRun().filter((d) => stepped(d) && d.part === which && formOf(d) === form);

  function press(group, attribute, value) {
    for (const b of find(group).querySelectorAll('button')) b.setAttribute('aria-pressed', String(b.dataset[attribute] === value));
  }

  // ---- the first divergence

  function sentence(which, d) {
    const line = h3.make('p', 'pa-divergence');
    line.dataset.passed = !d ? 'equal' : String(d.passed);
    const name = which === 'free' ? 'Free run' : 'Staged (each stage from stored inputs)';
    line.append(h3.make('b', '', name + ': '));
    if (!d) { line.append('every tensor is bit-equal.'); return line; }
    line.append(d.passed ? 'first difference at ' : 'first divergence beyond its gate at ');
    if (d.step !== null) line.append(h3.make('b', '', 'step ' + (d.step + 1)), ', ');
    const own = /^step[_ ]0*(\d+)$/.exec(d.stage);
    const place = own && Number(own[1]) === d.step ? d.quantity + ' of the ' + (d.part || 'network') : stageName(d.stage);
    const tensor = h3.make('code', '', d.name);
    tensor.title = 'The tensor of the golden, whose names count steps from 0';
    line.append('stage ', h3.make('b', '', place), ' (', tensor, '): ');
    line.append(d.problem || 'relative L2 ' + figure(d.relative_l2) + ', largest ' + figure(d.max_abs));
    line.append('; gate ' + gateOf(d) + '.');
    return line;
  }

  function first(result) {
    const box = find('.pa-first');
    box.replaceChildren();
    if (result.reason) box.append(h3.make('p', 'alert', result.reason));
    if (!result.compared) return;
    for (const which of ['free', 'staged']) {
      if (details.some((d) => d.run === which)) box.append(sentence(which, result.divergence[which]));
    }
  }

  // ---- curves

  const value = (d) => (metric === 'cosine' ? (d.cosine === null ? null : 1 - d.cosine) : d[metric]);

  // Where bit-equal steps are drawn: below everything that differs (above, for PSNR).
  function level(rows) {
    const differ = rows.filter((d) => !d.equal).map(value).filter((v) => v !== null && (metric === 'psnr' || v > 0));
    if (metric === 'psnr') return differ.length ? Math.max(...differ) + 15 : 100;
    const gates = metric === 'relative_l2' ? rows.map((d) => d.limit_relative_l2).filter(Boolean) : [];
    return Math.min(...differ, ...gates, 1e-6) / 10;
  }

  // Where steps without figures are drawn (not finite, another shape): beyond all that differs.
  function beyond(rows) {
    const known = rows.filter((d) => !d.equal).map(value).filter((v) => v !== null);
    if (metric === 'psnr') return Math.min(...known, 0) - 15;
    return 10 * Math.max(...known, ...rows.map((d) => d.limit_relative_l2 || 0), 1e-6);
  }

  function traces(rows, at) {
    const quantities = ORDER.filter((quantity) => rows.some((d) => d.quantity === quantity));
    const colours = h3.palette();
    const lines = quantities.map((quantity, i) => {
      const own = rows.filter((d) => d.quantity === quantity).sort((a, b) => a.step - b.step);
      return {
        type: 'scatter', mode: 'lines+markers', name: quantity, x: own.map((d) => d.step + 1),
        y: own.map((d) => (d.equal ? at : d.problem ? beyond(rows) : value(d) || at)), line: { color: colours[i], width: 2 },
        marker: { color: colours[i], size: 8, symbol: own.map((d) => (d.equal ? 'diamond-open' : d.passed ? 'circle' : 'x')) },
        text: own.map((d) => (d.equal ? 'bit-equal' : d.problem || figure(value(d)) + (d.passed ? '' : ', beyond the gate'))),
        hovertemplate: 'step %{x}: %{text}<extra>' + quantity.replace(/[<>&]/g, '') + '</extra>',
      };
    });
    const gate = metric === 'relative_l2' && rows.find((d) => d.limit_relative_l2);
    if (gate) {
      const ends = [Math.min(...rows.map((d) => d.step + 1)), Math.max(...rows.map((d) => d.step + 1))];
      lines.push({
        type: 'scatter', mode: 'lines', name: 'gate', x: ends, y: [gate.limit_relative_l2, gate.limit_relative_l2],
        line: { color: h3.colour('bad'), width: 1.5, dash: 'dash' }, hovertemplate: gateOf(gate).replace(/[<>&]/g, '') + '<extra></extra>',
      });
    }
    return lines;
  }

  function curves() {
    for (const div of root.querySelectorAll('.pa-plot')) {
      const rows = steps(div.dataset.part), at = level(rows);
      div.parentElement.hidden = !rows.length;
      if (!rows.length) continue;
      const log = metric !== 'psnr', shown = (v) => (log ? Math.log10(v) : v);
      const tops = rows.flatMap((d) => (d.equal ? [] : [d.problem ? beyond(rows) : value(d)]).concat(metric === 'relative_l2' ? d.limit_relative_l2 : [])).filter((v) => v > 0);
      const decades = Math.log10(Math.max(...tops, at) / at);
      const note = { xref: 'paper', x: 1.01, xanchor: 'left', y: shown(at), yanchor: 'middle', showarrow: false, text: 'bit-equal', font: { color: h3.colour('good'), size: 11 } };
      const line = { type: 'line', xref: 'paper', x0: 0, x1: 1, y0: at, y1: at, line: { color: h3.colour('good'), width: 1, dash: 'dot' } };
      const equal = rows.some((d) => d.equal);
      h3.plot(div, traces(rows, at), {
        height: 270, uirevision: run + metric + form, hovermode: 'closest', showlegend: true,
        margin: { l: 62, r: 60, t: 10, b: 40 },
        xaxis: { title: { text: 'step' }, dtick: rows.length > 60 ? undefined : 1, tickformat: 'd' },
        yaxis: { type: log ? 'log' : 'linear', title: { text: METRICS[metric][0] }, exponentformat: 'power', dtick: log ? Math.max(1, Math.ceil(decades / 7)) : undefined },
        annotations: equal ? [note] : [], shapes: equal ? [line] : [],
      });
    }
    h3.write(find('.pa-about'), METRICS[metric][1]);
    find('.pa-about').hidden = find('.pa-plots').hidden = !details.some((d) => d.run === run && d.step !== null && PLOTTED.test(d.quantity));
    find('.pa-metric').hidden = find('.pa-about').hidden;
  }

  // ---- tables

  function verdict(d) {
    if (d.equal) return ['bit-equal', 'better'];
    return d.passed ? [d.limit ? 'within' : 'not gated', ''] : ['beyond', 'worse'];
  }

  function cells(d) {
    if (d.equal) return [...Array(5).fill(['·', 'soft']), [gateOf(d), 'soft'], verdict(d)];
    if (d.problem) return [[d.problem, 'worse'], ...Array(4).fill(['–', 'soft']), [gateOf(d), 'soft'], verdict(d)];
    return [[figure(d.max_abs)], [figure(d.mean_abs)], [figure(d.relative_l2)], [cosine(d.cosine)], [psnr(d.psnr)], [gateOf(d), 'soft'], verdict(d)];
  }

  function row(name, list) {
    const th = h3.make('th', '', name);
    th.scope = 'row';
    return h3.make('tr', '', '', th, ...list.map(([text, cls]) => h3.make('td', cls || '', text)));
  }

  function head(names) {
    return h3.make('tr', '', '', ...names.map((name) => { const th = h3.make('th', '', name); th.scope = 'col'; return th; }));
  }

  function stepTable() {
    const box = find('.pa-steps'), rows = steps(part).sort(byStep);
    box.hidden = !steps('video').length && !steps('audio').length;
    box.querySelector('thead').replaceChildren(head(['Step', 'max', 'mean', 'rel. L2', 'cosine', 'PSNR', 'gate', '']));
    box.querySelector('tbody').replaceChildren(...rows.map((d, i) => {
      const tr = row(d.step + 1 + ' · ' + d.quantity, cells(d));
      if (i && rows[i - 1].step !== d.step) tr.className = 'pa-new';
      return tr;
    }));
  }

  const stageName = (stage) => stage.replace(/^step[_ ](\d+)(?=$| )/, (_, digits) => 'step ' + (Number(digits) + 1));

  function stageTable() {
    const stages = new Map();
    for (const d of ofRun()) stages.set(d.stage, [...(stages.get(d.stage) || []), d]);
    const box = find('.pa-stages');
    box.querySelector('thead').replaceChildren(head(['Stage', 'bit-equal', 'worst rel. L2', 'worst max', 'gate', '']));
    box.querySelector('tbody').replaceChildren(...[...stages].map(([stage, list]) => {
      const beyond = list.filter((d) => !d.passed), differ = list.filter((d) => !d.equal);
      const worst = (name) => differ.reduce((most, d) => (d[name] === null ? Infinity : Math.max(most, d[name])), 0);
      const said = beyond.length ? [beyond.length + ' beyond', 'worse'] : differ.length ? ['within', ''] : ['bit-equal', 'better'];
      const gate = [...new Set(list.map((d) => d.limit || 'not gated'))].join(', ');
      const shown = (name) => (differ.length ? [isFinite(worst(name)) ? figure(worst(name)) : '∞'] : ['·', 'soft']);
      return row(stageName(stage), [[list.length - differ.length + ' / ' + list.length], shown('relative_l2'), shown('max_abs'), [gate, 'soft'], said]);
    }));
  }

  // The forms of this replay, the model's own first; one is shown at a time.
  function forms() {
    const found = [...new Set(ofRun().filter(stepped).map(formOf))].sort((a, b) => b.startsWith('model') - a.startsWith('model') || a.localeCompare(b));
    if (!found.includes(form)) form = found[0] || '';
    const box = find('.pa-form');
    box.hidden = found.length < 2;
    box.replaceChildren(...found.map((name) => {
      const node = h3.button('', name, '');
      node.dataset.form = name;
      return node;
    }));
    press('.pa-form', 'form', form);
  }

  function draw() {
    forms();
    press('.pa-which', 'run', run);
    press('.pa-metric', 'metric', metric);
    press('.pa-part', 'part', part);
    curves();
    stepTable();
    stageTable();
  }

  find('.pa-bars').addEventListener('click', (event) => {
    const { run: which, metric: chosen, form: other } = event.target.dataset;
    if (!which && !chosen && !other) return;
    run = which || run;
    form = other || form;
    metric = chosen || metric;
    draw();
  });
  find('.pa-part').addEventListener('click', (event) => {
    if (!event.target.dataset.part) return;
    part = event.target.dataset.part;
    draw();
  });

  return {
    show(result, list) {
      details = list;
      const runs = [...new Set(list.map((d) => d.run))];
      if (!runs.includes(run)) run = runs[0] || 'free';
      find('.pa-which').hidden = runs.length < 2;
      find('.pa-tables').hidden = !list.length;
      h3.write(find('.pa-name'), nameOf(result));
      h3.write(find('.pa-status'), result.status);
      find('.pa-status').dataset.status = result.status;
      find('.pa-settings').replaceChildren(...(result.settings || []).map((s) => h3.make('li', '', s.field + ' ' + s.value, h3.make('span', 'soft', ' ' + (s.from === 'plan' ? 'plan' : 'golden')))));
      first(result);
      draw();
    },
  };
}
